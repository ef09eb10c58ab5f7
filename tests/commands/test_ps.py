"""``python -m aiorpc ps`` and its like: what they print, and that they need no torch."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time

import pytest

from aiorpc.__main__ import COMMANDS, main
from aiorpc.testing import cluster
from tests.limits import busy

LOOKS = {"ps": [], "stacks": ["worker0"], "wait-graph": [], "diagnose": ["--json"]}
WITHOUT_TORCH = """
import sys
from aiorpc.__main__ import main
status = main(sys.argv[1:])
heavy = {"torch", "numpy", "asyncio", "cryptography"} & set(sys.modules)
assert not heavy, heavy
sys.exit(status)
"""


async def run(*arguments: str) -> tuple[int, str, str]:
    """A command that fails if it has imported torch."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WITHOUT_TORCH, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return await process.wait(), out.decode(), err.decode()


@pytest.mark.parametrize("command", LOOKS)
async def test_it_needs_no_torch(command: str) -> None:
    """Nor what else takes long to import, with workers and without."""
    async with cluster(2):
        code, out, err = await run(command, *LOOKS[command])
        assert (code, err) == (0, "") and ("worker0" in out or command == "wait-graph")
    code, out, err = await run(command, *LOOKS[command])
    assert code == (1 if command == "ps" else 2)
    assert "no worker of this user runs on this host" in out + err


async def test_ps_is_quick() -> None:
    """0.3 s at best on an idle machine."""
    async with cluster(2):
        seconds = []
        for _ in range(5):
            begin = time.monotonic()
            assert (await run("ps"))[0] == 0
            seconds.append(time.monotonic() - begin)
    assert min(seconds) < 0.3 * busy()


async def test_ps_lists_the_workers_of_each_group() -> None:
    """A row for each, and the same as JSON."""
    async with cluster(2, roles=["learner", "actor"]):
        _, out, _ = await run("ps")
        _, made, _ = await run("ps", "--json")
    title, head, *rows = out.splitlines()
    assert title.startswith("group at ") and title.endswith(", 2 members")
    assert head.split() == ["WORKER", "ID", "ROLE", "STATE", "PID", "HOST", "UP", "CALLS", "METRICS"]
    assert [row.split()[:5] for row in rows] == [
        ["worker0", "0", "learner", "running", str(os.getpid())],
        ["worker1", "1", "actor", "running", str(os.getpid())],
    ]
    (group,) = json.loads(made)
    assert [report["name"] for report in group["reports"]] == ["worker0", "worker1"]


def test_what_can_be_run_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """With a line for each command, and the arguments of one."""
    with pytest.raises(SystemExit) as ended:
        main(["-h"])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and all(name in out for name in COMMANDS)
    with pytest.raises(SystemExit):
        main(["diagnose", "-h"])
    assert "--waiting" in capsys.readouterr().out
