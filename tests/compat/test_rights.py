"""Programs of torch.distributed.rpc with the option `allow`: what these modules say to each other needs no rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.test_programs import run

PROGRAM = """
import os
import sys

import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


def served(rank):
    return rank + 1


def run(rank, path):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", allow=["__main__:served"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    other = f"worker{1 - rank}"
    said = [rpc.rpc_sync(other, served, args=(rank,)), rpc.remote(other, served, args=(rank,)).to_here()]
    for refused, *args in ((os.mkdir, path + "-trace"), (lambda: 1,)):
        try:
            said.append(rpc.rpc_sync(other, refused, args=tuple(args)))
        except RuntimeError as error:
            said.append(type(error).__name__)
    said.append(sorted(rpc.api._all_gather(rank).items()))
    rpc.shutdown()
    if rank == 0:
        print(said, os.path.exists(path + "-trace"), flush=True)


if __name__ == "__main__":
    mp.spawn(run, args=(sys.argv[1],), nprocs=2)
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_program_with_rights_joins_gathers_and_leaves(tmp_path: Path) -> None:
    """Its calls go by its rules, which its children find under the name of the main module."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    printed = run(["-m", "aiorpc.compat.torch", str(path), str(tmp_path / "store")], tmp_path)
    assert printed == ["[1, 1, 'NotAllowed', 'NotAllowed', [('worker0', 0), ('worker1', 1)]] False"]


REFERENCES = """
import sys

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


class Counter:
    count = 0

    def add(self, n):
        self.count += n
        return self.count


def loss(x):
    return (x * x).sum()


def run(rank, how, path):
    rules = ["__main__:Counter", "__main__:Counter.*", "__main__:loss"]
    serialization = {"serialization": "safe"} if how == "safe" else {}
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", allow=rules, **serialization)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        counter = rpc.remote("worker1", Counter)
        said = [counter.rpc_sync().add(1), counter.rpc_async().add(1).wait(), counter.remote().add(1).to_here()]
        x = torch.ones(2, requires_grad=True)
        with dist_autograd.context() as context:
            rpc.remote("worker1", loss, args=(x,)).backward(context)
            said.append(dist_autograd.get_gradients(context)[x].tolist())
        print(said, flush=True)
        del counter
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run, args=tuple(sys.argv[1:]), nprocs=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["free", pytest.param("safe", marks=pytest.mark.long)])
def test_references_are_used_by_the_rules_for_their_values(how: str, tmp_path: Path) -> None:
    """Nothing more is asked for, whichever verb calls their methods, nor for a backward pass from one."""
    path = tmp_path / "program.py"
    path.write_text(REFERENCES)
    printed = run(["-m", "aiorpc.compat.torch", str(path), how, str(tmp_path / "store")], tmp_path)
    assert printed == ["[1, 2, 3, [2.0, 2.0]]"]
