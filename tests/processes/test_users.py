"""Two users of one host: they share no unix socket, memory or file with a secret, and work together all the same."""

from __future__ import annotations

import codecs
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import aiorpc as rpc
from tests.ports import free_port
from tests.processes import bodies
from tests.processes.workers import Link, Place, places, processes

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

NOBODY = 65534
SECRET = "for all users of this group"


@pytest.fixture
def folder() -> Iterator[Path]:
    """For temporary files of both users."""
    with tempfile.TemporaryDirectory(prefix="u-", dir="/tmp") as made:
        path = Path(made)
        path.chmod(0o1777)
        yield path


def become(place: Place, folder: Path) -> None:
    """This process is the user's of its place from now on: rank 1 is another one's."""
    tempfile.tempdir = str(folder)
    if place.rank == 1:
        for name in ("ascii", "idna"):  # later it is not found, where this Python lies in a folder of root's
            codecs.lookup(name)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def call_the_other(place: Place, link: Link, folder: Path) -> None:
    """Body: say what a small and a large call to the other worker give, and whether that is lost when it is killed."""
    become(place, folder)
    place.init_rpc(reconnect_grace=1000.0)
    other = f"w{1 - place.rank}"
    large = rpc.rpc_sync(other, bodies.echo, (torch.ones(500_000),))
    link.tell([rpc.rpc_sync(other, bodies.add, (1, 2)), float(large.sum())])
    if place.rank == 0:
        try:
            rpc.rpc_sync(other, bodies.block, timeout=0)
        except rpc.PeerLost as error:
            link.tell(error.worker)
    else:
        link.hear()
    rpc.shutdown(graceful=False)


@pytest.mark.slow
def test_two_users_of_one_host_work_together(folder: Path) -> None:
    """With a secret, over TCP on the loopback interface; a death is told at once."""
    with processes() as children:
        for place in places(2, f"tcp://127.0.0.1:{free_port()}"):
            children.start(place, call_the_other, folder, env={"AIORPC_SECRET": SECRET})
        assert [child.hear() for child in reversed(list(children))] == [[3, 500_000.0]] * 2
        children["w1"].kill()
        assert children["w0"].hear() == "w1"
        children.check_ended(but=("w1",))


def refused(place: Place, link: Link, folder: Path) -> str:
    """Body: how joining fails."""
    become(place, folder)
    try:
        place.init_rpc()
    except rpc.errors.RendezvousError as error:
        return str(error)
    rpc.shutdown(graceful=False)
    return "joined"


@pytest.mark.slow
def test_without_a_secret_both_users_are_told_why_they_cannot(folder: Path) -> None:
    """None of them joins, to wait for one that never comes."""
    with processes() as children:
        for place in places(2, f"tcp://127.0.0.1:{free_port()}"):
            children.start(place, refused, folder)
        said = [child.hear() for child in children]
        assert all("AIORPC_SECRET is not set" in text and "another user" in text for text in said), said
        children.check_ended()
