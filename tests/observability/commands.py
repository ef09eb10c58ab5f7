"""Commands of ``python -m aiorpc`` in a process of their own, and what the guide shows of their output."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.pages import DOCS

PAGE = DOCS / "howto" / "when_it_stands_still.md"
LIMIT = 60.0


@dataclass(frozen=True)
class Ran:
    """What a command did. seconds: how long it took."""

    code: int
    out: str
    err: str
    seconds: float


async def aiorpc(*arguments: str, path: str | None = None) -> Ran:
    """Run a command beside the running loop. path: for PATH."""
    env = {**os.environ, "PATH": os.environ["PATH"] if path is None else path}
    begin = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "aiorpc", *arguments, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), LIMIT)
    code = await process.wait()
    return Ran(code, out.decode(), err.decode(), time.monotonic() - begin)


def path_with_py_spy() -> str:
    """PATH with the folder in which py-spy was installed."""
    files = importlib.metadata.distribution("py-spy").files or []
    (program,) = (each.locate() for each in files if each.name == "py-spy")
    return f"{Path(str(program)).resolve().parent}{os.pathsep}{os.environ['PATH']}"


def path_without_py_spy(folder: Path) -> str:
    """PATH with one that fails, as where it is not permitted."""
    program = folder / "py-spy"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def shown(trouble: str, command: str) -> list[str]:
    """The lines that the guide shows of a command in a trouble."""
    block = rf"^<!-- trouble: {trouble} -->\n```console\n\$ python -m aiorpc {command}\n(.+?)^```"
    found = re.search(block, PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert found, f"the guide shows no {command!r} in the trouble {trouble!r}"
    return found[1].splitlines()


def same(text: str) -> str:
    """A line without what differs from run to run, or from machine to machine: numbers, and folders of files."""
    text = re.sub(r"(?<![\w'])/[^ :]*/", "", re.sub(r"(tests\.observability\.)?troubles:", "", text))
    text = text.replace("ended by signal 9 (SIGKILL)", "has ended")  # not every process may ask how another one ended
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "node", text)
    return " ".join(re.sub(r"\d+(\.\d+)?", "N", text).split())


def check_page(trouble: str, command: str, out: str) -> None:
    """The lines that the guide shows are lines of the output, in order; `...` stands for some that it leaves out."""
    lines = iter(out.splitlines())
    seen: list[str] = []
    for expected in shown(trouble, command):
        if expected.strip() == "...":
            continue
        for line in lines:
            seen.append(same(line))
            if seen[-1] == same(expected):
                break
        else:
            raise AssertionError(f"no line {same(expected)!r} of the guide in the output of {command!r}:\n{out}")


def lines_of(source: str, parts: Sequence[str]) -> list[int]:
    """The numbers of the lines of a file that have these parts, each the first one behind that before it."""
    lines = Path(source).read_text(encoding="utf-8").splitlines()
    found: list[int] = []
    for part in parts:
        start = found[-1] if found else 0
        found.append(next(n for n, line in enumerate(lines[start:], start + 1) if part in line))
    return found
