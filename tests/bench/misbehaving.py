"""A child process of the tests: a cohort whose client misbehaves, to see what its parent is told."""

from __future__ import annotations

import os
import signal
import sys
import time

from bench import cohort
from bench.stats import BenchError


def raises(rpc: object) -> None:
    raise ValueError("no such luck")


def dies(rpc: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(rpc: object) -> None:
    time.sleep(60)


def main(how: str) -> None:
    """Print the pids of the workers, then the error that came back, then whether any worker is left."""
    cohort.COMMAND_SECONDS = 20.0 if how != "hangs" else 3.0
    with cohort.Cohort("torch", ["server", "client"]).start() as pair:
        pids = [pair.run(name, own_pid) for name in pair.names]
        try:
            pair.run("client", {"raises": raises, "dies": dies, "hangs": hangs}[how])
        except BenchError as error:
            print(error)
    print("left:", [pid for pid in pids if os.path.exists(f"/proc/{pid}")])


def own_pid(rpc: object) -> int:
    return os.getpid()


if __name__ == "__main__":
    from tests.bench import misbehaving

    misbehaving.main(sys.argv[1])
