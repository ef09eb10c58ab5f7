"""``progress=True``: joining and calls of groups show how far they are, by rich or by tqdm, in a real terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import asyncio, time
import aiorpc as rpc
from torch.distributed import HashStore

def wait(seconds):
    time.sleep(seconds)

async def main():
    store = HashStore()
    async def join(rank, after):
        await asyncio.sleep(after)
        return await rpc.init(f"w{rank}", rank=rank, world_size=3, store=store, progress=rank == 0)
    workers = await asyncio.gather(*(join(rank, 1.5 * rank) for rank in range(3)))
    group = workers[0].group("*", progress=True)
    outcomes = await group.call(wait, 0.4)
    assert len(outcomes.answers) == 3
    await asyncio.gather(*(worker.shutdown() for worker in workers))
    print("done", workers[0]._repr_html_())

asyncio.run(main())
"""


def run(folder: Path, missing: tuple[str, ...], terminal: bool = True) -> tuple[int, str]:
    """Exit status and output of the program. missing: packages that cannot be imported."""
    for name in missing:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise ImportError('not installed')")
    program = folder / "program.py"
    program.write_text(PROGRAM)
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "TERM": "xterm-256color", "COLUMNS": "100"}
    if not terminal:
        done = subprocess.run(
            [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        return done.returncode, done.stdout + done.stderr
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    with subprocess.Popen([sys.executable, str(program)], stdout=slave, stderr=slave, env=environment) as process:
        os.close(slave)
        said = b""
        while True:
            try:
                said += os.read(master, 65536)
            except OSError:  # it has ended
                break
        os.close(master)
    return process.returncode, said.decode()


@pytest.mark.slow
@pytest.mark.parametrize("missing", [(), ("rich",)], ids=["rich", "tqdm"])
def test_a_terminal_shows_how_far_it_is(missing: tuple[str, ...], tmp_path: Path) -> None:
    """How many members have come, and how many outcomes."""
    status, said = run(tmp_path, missing)
    assert status == 0 and "done" in said, said
    for each in ("w0 joins", "2/3", "wait", "0/3"):
        assert each in said, said


@pytest.mark.slow
def test_without_a_terminal_nothing_is_in_the_output(tmp_path: Path) -> None:
    """By rich, which leaves out what would not be seen."""
    status, said = run(tmp_path, (), terminal=False)
    assert (
        status == 0
        and said.strip()
        == "done <table><caption>worker w0: closed</caption><thead><tr></tr></thead><tbody></tbody></table>"
    )


@pytest.mark.slow
def test_without_both_it_says_what_to_install(tmp_path: Path) -> None:
    """Before anything of the worker begins."""
    status, said = run(tmp_path, ("rich", "tqdm"), terminal=False)
    assert status == 1 and "RpcUsageError" in said and "pip install 'aiorpc-torch[progress]'" in said
