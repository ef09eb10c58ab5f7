"""``python -m aiorpc store``: it says where it is, serves group after group, and ends with a signal."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys

import pytest

import aiorpc
from aiorpc.__main__ import main
from aiorpc.runtime.meeting.stores import serve
from tests.runtime.test_rendezvous import server_made_once  # noqa: F401  # a fixture


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
async def test_groups_meet_there_until_it_is_ended(number: signal.Signals) -> None:
    """Its only line can be given as init_method; the signal ends it in good order."""
    command = [sys.executable, "-m", "aiorpc", "store", "--port", "0"]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    method = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().strip()
    try:
        for name in ("first", "second"):
            async with aiorpc.init(name, init_method=method) as worker:
                assert not worker.hosts_store and [info.name for info in worker.worker_infos()] == [name]
    finally:
        process.send_signal(number)
        code = await asyncio.wait_for(process.wait(), 60)
    assert code == 0


def dual() -> bool:
    """Whether this host has addresses of both kinds, and a socket may take both."""
    if not socket.has_dualstack_ipv6():
        return False
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not dual(), reason="this host has no IPv6")
def test_all_addresses_are_those_of_both_kinds() -> None:
    """A store at ``::`` takes those who come over IPv4, too."""
    store, port = serve("::", 0)
    for host in ("127.0.0.1", "::1"):
        socket.create_connection((host, port), 20).close()
    del store


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", "99999"), ("no such host", "0"), ("127.0.0.1", "")])
def test_an_address_that_cannot_be_had_is_told(host: str, port: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also that of somebody else."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["store", "--host", host, "--port", port or str(taken.getsockname()[1])]) == 1
    assert "python -m aiorpc store: cannot listen at" in capsys.readouterr().err
