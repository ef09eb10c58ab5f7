"""Programs with torch in milliseconds: forked from an interpreter that has it, ended as an interpreter ends by itself.

A child of multiprocessing never gets there (it leaves through ``os._exit``), and a new interpreter takes seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.limits import busy

from .workers import wait_for

ROOT = Path(__file__).parents[2]

# The children leave the loop and run to the end of the file, which is where an interpreter begins to shut down.
SERVER = """
import importlib, json, os, sys
import torch, aiorpc.sync, cloudpickle
torch.set_num_threads(1)
for name in sys.argv[1:]:
    importlib.import_module(name)
for line in sys.stdin:
    order = json.loads(line)
    if "wait" in order:
        answer = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
    else:
        answer = os.fork()
        if answer == 0:
            for number, path in ((0, os.devnull), (1, order["out"]), (2, order["err"])):
                os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), number)
            os.environ.update(order["env"])
            sys.argv[1:] = order["arguments"]
            break
    print(json.dumps([order["number"], answer]), flush=True)
else:
    sys.exit()
exec(compile(order["code"], "<program>", "exec"))
"""


@dataclass
class Zygote:
    """The interpreter that is forked; made by `zygote`."""

    process: subprocess.Popen[bytes]
    orders: int = 0

    def ask(self, timeout: float, **order: Any) -> int:
        """Its answer to an order; AssertionError when it does not come in time."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.orders += 1
        self.process.stdin.write(json.dumps({"number": self.orders, **order}).encode() + b"\n")
        number = answer = 0
        while number != self.orders:  # an earlier one whose answer nobody waited for any longer
            assert select.select([self.process.stdout], [], [], timeout)[0], f"no answer to {order} in {timeout:g} s"
            number, answer = json.loads(self.process.stdout.readline())
        return answer

    @contextlib.contextmanager
    def run(
        self, code: str, arguments: Sequence[str], folder: Path, env: dict[str, str] | None = None
    ) -> Iterator[Program]:
        """Start a program; at the end of the block it has ended or is killed."""
        out, err = folder / "out", folder / "err"
        order = {"code": code, "arguments": list(arguments), "env": env or {}, "out": str(out), "err": str(err)}
        program = Program(self, self.ask(55 * busy(), **order), out, err)  # the first waits for torch
        try:
            yield program
        finally:
            if program.code is None:
                os.kill(program.pid, signal.SIGKILL)
                if not program.awaited:  # else the zygote waits for it already, and has it once only
                    self.ask(10 * busy(), wait=program.pid)


@dataclass
class Program:
    """A program forked from the zygote, and the files it writes to.

    code: how it ended, as in subprocess. awaited: whether the zygote was asked to wait for its end.
    """

    zygote: Zygote
    pid: int
    out_file: Path
    err_file: Path
    code: int | None = None
    awaited: bool = False

    @property
    def out(self) -> str:
        """What it has printed so far."""
        return self.out_file.read_text() if self.out_file.exists() else ""

    @property
    def err(self) -> str:
        """What it has written to stderr so far."""
        return self.err_file.read_text() if self.err_file.exists() else ""

    def wait_for_line(self, line: str, timeout: float = 30.0) -> None:
        """Wait until it has printed that line."""
        wait_for(lambda: line in self.out.splitlines(), timeout)

    def finish(self, timeout: float) -> None:
        """Wait for its end, `timeout` seconds where the machine has nothing else to do."""
        self.awaited = True
        self.code = self.zygote.ask(timeout * busy(), wait=self.pid)


@contextlib.contextmanager
def zygote(*modules: str) -> Iterator[Zygote]:
    """An interpreter that has loaded torch, aiorpc and some modules, to fork programs from."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SERVER, *modules]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        try:
            yield Zygote(process)
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.communicate(timeout=10 * busy())  # closes its input, which ends it
            if process.poll() is None:
                process.kill()
