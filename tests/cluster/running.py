"""Commands that a page shows, run on hosts as a user would."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests import pages
from tests.processes.workers import wait_for

from .hosts import Machine, environment, find, run

LIMIT = 90.0  # seconds for a run that takes about ten
#: This user is root, whom mpirun warns; and this machine may have fewer cores than the tests start processes.
MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def shown(page: str, start: str) -> str:
    """The only command of a page that begins so."""
    [command] = [line for line in pages.commands(page) if line.startswith(start)]
    return command


@dataclass(frozen=True)
class Running:
    """One command on several hosts."""

    folder: Path
    hosts: Sequence[Machine]
    logs: Sequence[Path]
    processes: Sequence[subprocess.Popen[bytes]]

    def log(self) -> str:
        """What it has printed so far, host by host."""
        return "".join(log.read_text(errors="replace") for log in self.logs)

    def wait_for_line(self, pattern: str) -> str:
        """Wait for a line in which this is found, and return it."""

        def found() -> str:
            line = next((line for line in self.log().splitlines() if re.search(pattern, line)), "")
            assert line or any(process.poll() is None for process in self.processes), self.log()
            return line

        return str(wait_for(found, LIMIT))

    def kill(self, text: str, **variables: str) -> None:
        """SIGKILL for the only process with that text on its command line and these variables."""
        [(host, pid)] = [(host, pid) for host in self.hosts for pid in find(host, text, self.folder, **variables)]
        run(host, "kill", "-KILL", str(pid), cwd=self.folder, env={}, seconds=LIMIT)

    def wait(self) -> str:
        """Wait until all have ended without an error; what they have printed."""
        codes = [process.wait(LIMIT) for process in self.processes]
        assert codes == [0] * len(codes), f"{codes}\n{self.log()}"
        return self.log()


@contextlib.contextmanager
def running(command: str, hosts: Sequence[Machine], folder: Path, **variables: str) -> Iterator[Running]:
    """Start it in the shared folder; no Python process is left there at the end of the block."""
    logs = [folder / f"{host.name}.log" for host in hosts]
    env = environment(folder, **variables)
    processes = []
    try:
        for host, log in zip(hosts, logs, strict=True):
            with open(log, "wb") as out:
                words = host.command("bash", "-c", command, cwd=folder)
                processes.append(subprocess.Popen(words, env=env, stdout=out, stderr=subprocess.STDOUT))
        yield Running(folder, hosts, logs, processes)
        wait_for(lambda: not any(find(host, "^[^ ]*python ", folder) for host in hosts), LIMIT)
    finally:
        for process in processes:
            process.kill()
            process.wait()
