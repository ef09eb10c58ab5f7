"""What public programs were seen to do that no test of PyTorch's does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import busy

ROOT = Path(__file__).resolve().parents[2]

#: One trainer of a parameter server ends with an exception, after it has worked. The other one comes to the end later.
TRAINER_FAILS = """
import os, sys, time
import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


def run(rank, path, order):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}")
    rpc.init_rpc(NAMES[order][rank], rank=rank, world_size=3, rpc_backend_options=options)
    if rank:
        rpc.rpc_sync(NAMES[order][0], torch.add, args=(torch.ones(2), rank))
    if rank == 2:
        raise ValueError("a trainer fails")
    while rank == 1 and not os.path.exists(path + ".failed"):
        time.sleep(0.05)
    rpc.shutdown()


NAMES = {"first": ["a", "b", "c"], "last": ["c", "b", "a"], "between": ["b", "a", "c"]}

if __name__ == "__main__":
    mp.set_start_method("spawn")
    children = [mp.Process(target=run, args=(rank, *sys.argv[1:])) for rank in range(3)]
    for child in children:
        child.start()
    children[2].join()
    open(sys.argv[1] + ".failed", "w").close()
    for child in children:
        child.join()
    print([child.exitcode for child in children])
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("order", ["first", "last", "between"])
def test_a_trainer_that_fails_holds_nobody_up(order: str, tmp_path: Path) -> None:
    """The others' shutdown returns, although one of them never had a connection to it, whoever's name leads."""
    program = tmp_path / "program.py"
    program.write_text(TRAINER_FAILS)
    command = [sys.executable, "-m", "aiorpc.compat.torch", str(program), str(tmp_path / "meeting"), order]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120 * busy())
    assert done.stdout.splitlines() == ["[0, 0, 1]"], done.stderr
    assert "a trainer fails" in done.stderr
