"""``python -m aiorpc store``: it says where it is, serves group after group, and ends with a signal."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

import aiorpc
from aiorpc.__main__ import main

pytestmark = pytest.mark.usefixtures("server_made_once")


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


@pytest.mark.slow
@pytest.mark.parametrize(("host", "printed"), [("0.0.0.0", r"[\d.]+"), ("::", r"[\d.]+|\[[\da-f:]+\]")])
def test_what_it_prints_leads_to_it(host: str, printed: str) -> None:
    """All addresses mean nobody's elsewhere: one of this host is printed. ``::`` is that of both kinds."""
    if host == "::" and not dual():
        pytest.skip("this host has no IPv6")
    command = [sys.executable, "-m", "aiorpc", "store", "--port", "0", "--host", host]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.fullmatch(rf"tcp://({printed}):(\d+)\n", process.stdout.readline())
            assert found is not None and found[1] not in ("0.0.0.0", "[::]")
            for address in {found[1].strip("[]"), "127.0.0.1", *(["::1"] if host == "::" else [])}:
                socket.create_connection((address, int(found[2])), 20).close()
        finally:
            process.terminate()
    assert process.returncode == 0


@pytest.mark.parametrize(("where", "what"), [("/dev/full", "No space left"), ("closed pipe", "Broken pipe")])
def test_an_address_that_nobody_can_read_is_told(where: str, what: str) -> None:
    """In a line, and not by a traceback."""
    if where == "closed pipe":
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open(where, os.O_WRONLY)
    try:
        command = [sys.executable, "-m", "aiorpc", "store", "--port", "0"]
        ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(writing)
    assert ended.returncode == 1
    said = ended.stderr.splitlines()[-1]
    assert said.startswith("python -m aiorpc store: cannot write its output: ") and what in said
    assert "Traceback" not in ended.stderr and "Exception ignored" not in ended.stderr


@pytest.mark.parametrize(
    ("host", "port"), [("127.0.0.1", "99999"), ("no such host", "0"), ("127.0.0.1", ""), ("", "0")]
)
def test_an_address_that_cannot_be_had_is_told(host: str, port: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also that of somebody else."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["store", "--host", host, "--port", port or str(taken.getsockname()[1])]) == 1
    assert "python -m aiorpc store: cannot listen at" in capsys.readouterr().err
