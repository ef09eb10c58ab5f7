"""Old programs as they are: scripts, modules, spawned and forked children, children of another process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What a program of torch.distributed.rpc looks like; nothing in it knows of aiorpc.
PROGRAM = """
import os
import sys

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch.distributed.rpc import RRef, rpc_async


def whose():
    return rpc.__name__, sys.modules["torch.distributed.rpc.api"].__name__, RRef.__module__


def run(rank, world_size, path):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank == 0:
        print(rpc_async("worker1", torch.add, args=(torch.ones(2), 1)).wait().tolist())
        print(*rpc.rpc_sync("worker1", whose))
    rpc.shutdown()


def forked(path):
    if not os.fork():
        run(1, 2, path)
        os._exit(0)
    run(0, 2, path)
    os.wait()


if __name__ == "__main__":
    how, path = sys.argv[1:]
    if how == "spawn":
        mp.spawn(run, args=(2, path), nprocs=2)
    elif how == "pool":
        with mp.get_context("spawn").Pool(2) as pool:
            pool.starmap(run, [(0, 2, path), (1, 2, path)], chunksize=1)
    elif how == "fork":
        forked(path)
    else:
        run(int(how), 2, path)
"""
EXPECTED = ["[2.0, 2.0]", "aiorpc.compat.torch.rpc aiorpc.compat.torch.rpc.api aiorpc.compat.torch.rpc.rref"]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def run(arguments: list[str], directory: Path) -> list[str]:
    """The lines that a Python process prints; it has to end well."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=directory, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_script_and_the_children_it_spawns(program: Path, tmp_path: Path) -> None:
    """``python -m aiorpc.compat.torch script.py``; children of `torch.multiprocessing.spawn` get it, too."""
    assert run(["-m", "aiorpc.compat.torch", str(program), "spawn", str(tmp_path / "store")], tmp_path) == EXPECTED


@pytest.mark.slow
def test_a_module_and_its_forked_child(program: Path, tmp_path: Path) -> None:
    """``python -m aiorpc.compat.torch -m module``."""
    assert run(["-m", "aiorpc.compat.torch", "-m", "program", "fork", str(tmp_path / "store")], tmp_path) == EXPECTED


@pytest.mark.slow
def test_install_reaches_spawned_children(program: Path, tmp_path: Path) -> None:
    """A program that calls `install` itself, in its main part alone: workers of a Pool that it spawns have it, too."""
    starter = tmp_path / "starter.py"
    starter.write_text(
        "if __name__ == '__main__':\n"
        "    from aiorpc.compat.torch import install\n"
        "    install()\n"
        "    import sys, program\n"
        "    import torch.multiprocessing as mp\n"
        "    with mp.get_context('spawn').Pool(2) as pool:\n"
        "        pool.starmap(program.run, [(0, 2, sys.argv[1]), (1, 2, sys.argv[1])], chunksize=1)\n"
    )
    assert run([str(starter), str(tmp_path / "store")], tmp_path) == EXPECTED


@pytest.mark.slow
def test_children_of_another_kind(program: Path, tmp_path: Path) -> None:
    """Processes that a program starts itself, as torchrun does, get it through the environment; so do their own."""
    launcher = tmp_path / "launcher.py"
    launcher.write_text(
        "import subprocess, sys\n"
        "children = [subprocess.Popen([sys.executable, 'program.py', rank, sys.argv[1]]) for rank in '01']\n"
        "sys.exit(max(child.wait() for child in children))\n"
    )
    assert run(["-m", "aiorpc.compat.torch", str(launcher), str(tmp_path / "store")], tmp_path) == EXPECTED


@pytest.mark.slow
def test_a_worker_that_dies_does_not_hold_up_the_others(tmp_path: Path) -> None:
    """Where torch's would wait for it for ever, `shutdown` of the others returns."""
    (tmp_path / "dying.py").write_text(
        "import os, sys, time\n"
        "import torch.distributed.rpc as rpc\n"
        "children = [os.fork() for _ in range(1)]\n"
        "rank = 0 if children[0] else 1 + (os.fork() == 0)\n"
        "options = rpc.TensorPipeRpcBackendOptions(init_method='file://' + sys.argv[1], loss_grace=0.5)\n"
        "rpc.init_rpc(f'worker{rank}', rank=rank, world_size=3, rpc_backend_options=options)\n"
        "rpc.api._barrier({'worker0', 'worker1', 'worker2'})\n"
        "if rank == int(sys.argv[2]):\n"
        "    os._exit(0)\n"
        "began = time.monotonic()\n"
        "rpc.shutdown()\n"
        "print(rank, time.monotonic() - began < 8, flush=True)\n"
        "if rank < 2:\n"
        "    os.wait()\n"
    )
    for dead in (0, 2):
        arguments = ["-m", "aiorpc.compat.torch", "dying.py", str(tmp_path / f"store{dead}"), str(dead)]
        lines = run(arguments, tmp_path)
        assert sorted(lines) == [f"{rank} True" for rank in range(3) if rank != dead]


def test_the_environments_own_customization_still_runs(tmp_path: Path) -> None:
    """A ``sitecustomize`` that would have been imported is imported; nothing of torch is, where nobody asks for it."""
    (tmp_path / "sitecustomize.py").write_text("print('customized')\n")
    (tmp_path / "script.py").write_text(
        "import os, subprocess, sys\n"
        "path = os.environ['PYTHONPATH'] + os.pathsep + os.getcwd()\n"
        "code = 'import sys; print(\"torch\" in sys.modules)'\n"
        "sys.exit(subprocess.run([sys.executable, '-c', code], env={**os.environ, 'PYTHONPATH': path}).returncode)\n"
    )
    assert run(["-m", "aiorpc.compat.torch", "script.py"], tmp_path) == ["customized", "False"]


def test_what_cannot_be_run() -> None:
    """The command line says how it is used."""
    done = subprocess.run(
        [sys.executable, "-m", "aiorpc.compat.torch"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "usage: python -m aiorpc.compat.torch" in done.stderr
