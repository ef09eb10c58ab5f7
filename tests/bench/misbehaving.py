"""A child process of the tests: a cohort whose client misbehaves, to see what its parent is told."""

from __future__ import annotations

import os
import signal
import time

from bench import cohort
from bench.stats import BenchError


def raises(rpc: object) -> None:
    raise ValueError("no such luck")


def dies(rpc: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(rpc: object) -> None:
    time.sleep(60)


def main() -> None:
    """For each way: the error that came back, then the workers that are left. One program: its server has torch."""
    for client in (raises, dies, hangs):
        print(f"--- {client.__name__}")
        with cohort.Cohort("torch", ["server", "client"]).start() as pair:
            pids = [pair.run(name, own_pid) for name in pair.names]
            cohort.COMMAND_SECONDS = 1.0 if client is hangs else 20.0
            try:
                pair.run("client", client)
            except BenchError as error:
                print(error)
        print("left:", [pid for pid in pids if os.path.exists(f"/proc/{pid}")])


def own_pid(rpc: object) -> int:
    return os.getpid()


if __name__ == "__main__":
    from tests.bench import misbehaving

    misbehaving.main()
