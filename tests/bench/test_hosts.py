"""Hosts of the bench: joined by links of a limited rate, and gone afterwards; without them a line says so."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import host_clients, hosts, publishing_hosts
from bench.hosts import NoHostsError, enter, joined
from tests.bench.here import Here

MBIT = 1e6 / 8


def there_are(stem: str) -> bool:
    return bool(list(Path("/run/netns").glob(f"{stem}*")))


def test_a_link_is_as_fast_as_is_said() -> None:
    """A bare socket needs as long as the rate asks for, and the namespaces are gone afterwards."""
    size, rate = 1 << 20, 40.0
    try:
        with joined(2, rate) as network:
            first, second = network.all
            received: list[int] = []
            listener: list[socket.socket] = []

            def receive() -> None:
                enter(second.namespace)
                listener.append(socket.create_server((second.address, 0)))
                ready.set()
                with listener[0], listener[0].accept()[0] as peer:
                    while data := peer.recv(1 << 16):
                        received.append(len(data))

            def send() -> None:
                enter(first.namespace)
                with socket.create_connection(listener[0].getsockname()) as peer:
                    peer.sendall(bytes(size))

            ready = threading.Event()
            receiver = threading.Thread(target=receive)
            receiver.start()
            assert ready.wait(10)
            begun = time.monotonic()
            sender = threading.Thread(target=send)
            sender.start()
            sender.join(30)
            receiver.join(30)
            # A burst of 256 kB at each end of the way is not held back.
            assert sum(received) == size
            assert time.monotonic() - begun > 0.9 * (size - (1 << 19)) / (rate * MBIT)
            stem = first.namespace.rpartition("-")[0]
            assert there_are(stem)
    except NoHostsError as error:
        pytest.skip(f"no network namespaces: {error}")
    assert not there_are(stem)


def test_what_a_killed_run_left_goes_with_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those whose process is gone, and no others."""
    gone, alive = f"{hosts.PREFIX}-999999999-00-0", f"{hosts.PREFIX}-{os.getpid()}-00-0"
    for name in (gone, alive, "other"):
        (tmp_path / name).touch()
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(hosts, "NAMESPACES", tmp_path)
    monkeypatch.setattr(hosts, "run", lambda *command: ran.append(command))
    with joined(0, 1.0):
        assert ran[0] == ("ip", "netns", "delete", gone)
    assert not [command for command in ran if alive in command]


def test_without_hosts_a_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And there are no rows."""

    def refused(*_: object) -> Any:
        raise NoHostsError("there is no ip command")

    monkeypatch.setattr(publishing_hosts, "joined", refused)
    assert publishing_hosts.publish(SimpleNamespace(null=False)) == []  # type: ignore[arg-type]  # all it needs
    assert "there is no ip command" in capsys.readouterr().err


class Stage:
    """What the measurement needs of one: each way takes so many milliseconds, by what runs it."""

    null = False

    @contextlib.contextmanager
    def start(self, side: str, names: list[str], *, options: Any, hosts: hosts.Hosts) -> Iterator[Any]:
        assert len(names) == len(hosts.all)
        took = {"publish": 120.0, "bare": 100.0, "call": 150.0}
        yield SimpleNamespace(run=lambda name, function, **_: took.get(function.__name__))

    def alternate(self, cases: dict[str, Callable[[], Any]]) -> dict[str, list[Any]]:
        return {name: [case()] for name, case in cases.items()}


def test_the_rows_compare_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target holds against the bare socket."""

    def some(count: int, rate: float) -> Any:
        made = tuple(hosts.Host(f"host{number}", f"10.0.0.{number}") for number in range(count))
        return contextlib.nullcontext(hosts.Hosts(made))

    monkeypatch.setattr(publishing_hosts, "joined", some)
    rows = publishing_hosts.publish(Stage())  # type: ignore[arg-type]  # what it needs of one
    assert [row.aiorpc for row in rows] == [(120.0,), (1.2,), (0.8,)]
    assert [row.passed for row in rows] == [None, True, None]


def test_a_bare_transfer_ends_when_all_bytes_have_come() -> None:
    """And takes the reader's word for it."""
    rpc = Here()
    assert host_clients.bare(rpc, ["reader"], "127.0.0.1", 1 << 20) > 0
    assert rpc.functions == [host_clients.listen]
