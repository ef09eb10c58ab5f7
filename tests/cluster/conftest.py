"""A Slurm for all tests of a file, and what they run there."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .slurm import Slurm, cluster

TOOLS = ("slurmctld", "slurmd", "srun", "munged", "mpirun", "ip")


@pytest.fixture(scope="session")
def _tools() -> None:
    missing = [name for name in TOOLS if shutil.which(name) is None]
    assert not missing, f"there is no {', '.join(missing)}: run `make testcluster` as root"


@pytest.fixture(scope="module")
def shared(_tools: None) -> Iterator[Path]:
    """The folder that all hosts share; in it `bin/torchrun`, of this Python. A short path: sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="cluster-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        torchrun = Path(folder, "bin", "torchrun")
        torchrun.parent.mkdir()
        torchrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
        torchrun.chmod(0o755)
        yield Path(folder)


@pytest.fixture(scope="module")
def slurm(shared: Path) -> Iterator[Slurm]:
    """Four nodes, and a login host."""
    with cluster(shared) as made:
        yield made
