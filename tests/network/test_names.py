"""Names of addresses: a name server that is slow to answer is asked no more than torch's client asks it by itself."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

from aiorpc.runtime.meeting.meeting_place import MeetingPlace
from aiorpc.runtime.meeting.patience import Patience
from aiorpc.runtime.meeting.stores import reach_tcp, serve
from bench.hosts import enter, namespaces, run

from ..processes.workers import Link, Place, places, processes
from .hosts import needed

SECONDS = 30.0
UNKNOWN = b"\x81\x83"  # flags of an answer: there is no such name
_HEADER = 12  # bytes of a question, after which there is the name


def name_server() -> str:
    """The address of the first one that is asked; the resolver's default is this host."""
    lines = (line.split() for line in Path("/etc/resolv.conf").read_text().splitlines())
    return next((words[1] for words in lines if words[:1] == ["nameserver"]), "127.0.0.1")


@contextlib.contextmanager
def answering(server: str) -> Iterator[Callable[[], int]]:
    """A name server that knows no name; tells how often it was asked."""
    asked: list[bytes] = []

    def answer() -> None:
        while True:
            question, sender = listening.recvfrom(512)
            if not question:
                return
            asked.append(question)
            listening.sendto(question[:2] + UNKNOWN + question[4:6] + bytes(6) + question[_HEADER:], sender)

    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as listening:
        listening.bind((server, 53))
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield lambda: len(asked)
        finally:
            with socket.socket(family, socket.SOCK_DGRAM) as last:
                last.sendto(b"", (server, 53))
            thread.join()


def reach_a_store(place: Place, link: Link, namespace: str, server: str) -> tuple[int, int]:
    """Body: how often the name server is asked by a client of torch, and by one that aiorpc looks after."""
    enter(namespace)
    with answering(server) as asked:
        store, port = serve("127.0.0.1", 0)
        counts = [asked()]
        TCPStore("127.0.0.1", port, None, False, timedelta(seconds=SECONDS), False)
        counts.append(asked())
        where = MeetingPlace(None, None, host="127.0.0.1", port=port)
        with closing(reach_tcp(where, Patience(SECONDS), SECONDS)) as kv:
            kv.put("key", "value")
        del store
        counts.append(asked())
    return counts[1] - counts[0], counts[2] - counts[1]


def test_a_store_is_reached_without_asking_for_more_names() -> None:
    """What torch's clients print as would say which connection is theirs, and has the names of both ends looked up."""
    server = name_server()
    with contextlib.ExitStack() as stack:
        with needed("network namespaces"):
            [namespace] = stack.enter_context(namespaces("left"))
        if not ipaddress.ip_address(server).is_loopback:
            run("ip", "-n", namespace, "address", "add", server, "dev", "lo")
        children = stack.enter_context(processes())
        [place] = places(1, "file:///unused")
        torch_alone, ours = children.start(place, reach_a_store, namespace, server).hear()
        assert ours <= torch_alone
