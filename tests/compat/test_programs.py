"""Old programs as they are: scripts, modules, spawned and forked children, children of another process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aiorpc.compat.torch.children import SITE
from tests.limits import busy
from tests.ports import free_port

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
        print(rpc_async("worker1", torch.add, args=(torch.ones(2), 1)).wait().tolist(), flush=True)
        print(*rpc.rpc_sync("worker1", whose), flush=True)
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


def run(arguments: list[str], directory: Path, python_path: str | Path = ROOT) -> list[str]:
    """The lines that a Python process prints; it has to end well."""
    # Buffered: lines of several processes do not mix.
    environment = os.environ | {"PYTHONPATH": str(python_path), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
    command, patience = [sys.executable, *arguments], 120 * busy()
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=patience)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.long
@pytest.mark.slow
def test_a_script_and_the_children_it_spawns(program: Path, tmp_path: Path) -> None:
    """``python -m aiorpc.compat.torch script.py``; children of `torch.multiprocessing.spawn` get it, too."""
    assert run(["-m", "aiorpc.compat.torch", str(program), "spawn", str(tmp_path / "store")], tmp_path) == EXPECTED


@pytest.mark.slow
def test_a_module_and_its_forked_child(program: Path, tmp_path: Path) -> None:
    """``python -m aiorpc.compat.torch -m module``."""
    assert run(["-m", "aiorpc.compat.torch", "-m", "program", "fork", str(tmp_path / "store")], tmp_path) == EXPECTED


# Parameters that lie elsewhere, as an L2 penalty uses them, and as other values do.
PENALTY = """
import os
import sys

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer

WEIGHT = torch.nn.Parameter(torch.ones(2))


def fill(module):
    for parameter in module.local_value().parameters():
        torch.nn.init.constant_(parameter, 1.0)


def weights(module):
    return [parameter.tolist() for parameter in module.local_value().parameters()]


def weight():
    return WEIGHT


def reference():
    return rpc.RRef(WEIGHT)


def references():
    return rpc.RRef([WEIGHT, WEIGHT])


def module():
    return rpc.RRef(torch.nn.ParameterList([WEIGHT]))


def gradient(context_id):
    found = dist_autograd.get_gradients(context_id).get(WEIGHT)
    return None if found is None else found.tolist()


def run(rank, path):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        module_ = RemoteModule("worker1", torch.nn.Linear, args=(3, 1))
        parameters = module_.remote_parameters()
        rpc.rpc_sync("worker1", fill, (module_.get_module_rref(),))
        optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.25)
        with dist_autograd.context() as context_id:
            penalty = sum((each.to_here() ** 2).sum() for each in parameters)
            dist_autograd.backward(context_id, [module_(torch.ones(1, 3)).sum() + penalty])
            optimizer.step(context_id)
        print(rpc.rpc_sync("worker1", weights, (module_.get_module_rref(),)))
        takers = [
            (rpc.rpc_sync("worker1", reference), lambda value: value),
            (rpc.rpc_sync("worker1", references), lambda value: value[1]),
            (rpc.remote("worker1", torch.mul, (torch.nn.Parameter(torch.ones(2)), 1)), lambda value: value),
            (rpc.rpc_sync("worker1", module), lambda value: value[0]),
            (rpc.remote("worker1", weight), lambda value: value),
        ]
        for reference_, take in takers:
            with dist_autograd.context() as context_id:
                value = take(reference_.to_here())
                dist_autograd.backward(context_id, [(value * 3).sum()])
                try:
                    there = rpc.rpc_sync("worker1", gradient, (context_id,))
                except RuntimeError:
                    there = "no context"
                print(type(value).__name__, value.is_leaf, there)
    rpc.shutdown()


if __name__ == "__main__":
    if not os.fork():
        run(1, sys.argv[1])
        os._exit(0)
    run(0, sys.argv[1])
    os.wait()
"""
PENALIZED = [
    "[[[0.25, 0.25, 0.25]], [0.25]]",
    "Tensor False [3.0, 3.0]",
    "Tensor False [3.0, 3.0]",
    "Tensor False None",
    "Parameter True None",
    "Parameter True None",
]


@pytest.mark.slow
def test_values_of_references_that_are_parameters(tmp_path: Path) -> None:
    """Those of ``RRef(value)`` and of operators have a past and are no Parameters, and others are some without one."""
    (tmp_path / "program.py").write_text(PENALTY)
    found = run(["-m", "aiorpc.compat.torch", "program.py", str(tmp_path / "store")], tmp_path)
    assert found == PENALIZED


@pytest.mark.long
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
@pytest.mark.parametrize("dead", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_worker_that_dies_does_not_hold_up_the_others(dead: int, tmp_path: Path) -> None:
    """Where torch's would wait for it for ever, `shutdown` of the others returns."""
    (tmp_path / "dying.py").write_text(
        "import os, sys\n"
        "import torch.distributed.rpc as rpc\n"
        "children = [os.fork() for _ in range(1)]\n"
        "rank = 0 if children[0] else 1 + (os.fork() == 0)\n"
        "place = 'file://' + sys.argv[1]\n"
        "options = rpc.TensorPipeRpcBackendOptions(init_method=place, rpc_timeout=600)\n"
        "rpc.init_rpc(f'worker{rank}', rank=rank, world_size=3, rpc_backend_options=options)\n"
        "rpc.api._barrier({'worker0', 'worker1', 'worker2'})\n"
        "if rank == int(sys.argv[2]):\n"
        "    os._exit(0)\n"
        "rpc.shutdown()\n"
        "print(rank, flush=True)\n"
        "if rank < 2:\n"
        "    os.wait()\n"
    )
    lines = run(["-m", "aiorpc.compat.torch", "dying.py", str(tmp_path / "store"), str(dead)], tmp_path)
    assert sorted(lines) == [str(rank) for rank in range(3) if rank != dead]


@pytest.mark.long
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


@pytest.mark.long
def test_a_spawned_child_waits_for_torch(tmp_path: Path) -> None:
    """It finds aiorpc as its parent did, by ``sys.path`` alone, and imports neither before it imports torch."""
    (tmp_path / "script.py").write_text(
        "import multiprocessing, sys\n"
        "def loaded():\n"
        "    return 'torch' in sys.modules, 'aiorpc' in sys.modules\n"
        "def whose():\n"
        "    import torch.distributed.rpc as rpc\n"
        "    return rpc.__name__\n"
        "if __name__ == '__main__':\n"
        f"    sys.path.append({str(ROOT)!r})\n"
        "    from aiorpc.compat.torch import install\n"
        "    install()\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(*pool.apply(loaded), pool.apply(whose))\n"
    )
    assert run(["script.py"], tmp_path, "") == ["False False aiorpc.compat.torch.rpc"]


@pytest.mark.long
def test_a_child_without_aiorpc_on_its_path(tmp_path: Path) -> None:
    """It is found once torch comes, behind all else."""
    code = (
        "import os, sys\n"
        "sys.path[:] = [each for each in sys.path if not os.path.isdir(os.path.join(each, 'aiorpc', 'compat'))]\n"
        "import torch.distributed.rpc as rpc\n"
        "print(rpc.__name__, sys.path[-1])\n"
    )
    assert run(["-c", code], tmp_path, SITE) == [f"aiorpc.compat.torch.rpc {ROOT}"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["torch.distributed.nn.api.remote_module", "torch.distributed.optim.optimizer"])
def test_modules_that_are_imported_first_of_all(name: str, tmp_path: Path) -> None:
    """``import a.b.c as d`` gives ours, though nothing has imported a.b."""
    assert run(["-c", f"import {name} as m; import {name}; print(m.__name__, {name} is m)"], tmp_path, SITE) == [
        f"aiorpc.compat.torch.{'nn' if 'nn' in name else 'optim'} True"
    ]


@pytest.mark.long
@pytest.mark.parametrize("how", [[], ["-P"]])
def test_a_thread_that_outlives_the_script(how: list[str], tmp_path: Path) -> None:
    """It finds the script's names in ``__main__``; ``-P`` keeps the script's directory off the path."""
    (tmp_path / "script.py").write_text(
        "import sys, threading\n"
        "def later():\n"
        "    threading.main_thread().join()\n"
        f"    print(sys.modules['__main__'].later is later, sys.path[0] == {str(tmp_path)!r})\n"
        "threading.Thread(target=later).start()\n"
    )
    (tmp_path / "elsewhere").mkdir()
    arguments = [*how, "-m", "aiorpc.compat.torch", str(tmp_path / "script.py")]
    assert run(arguments, tmp_path / "elsewhere") == [f"True {not how}"]


@pytest.mark.slow
def test_a_script_that_changes_its_directory_is_found(tmp_path: Path) -> None:
    """However it was named on the command line: Python says of a script where it is, and so does this."""
    (tmp_path / "script.py").write_text("import os\nos.chdir('/')\nprint(__file__, (lambda: 0).__code__.co_filename)\n")
    path = tmp_path / "script.py"
    assert run(["-m", "aiorpc.compat.torch", "script.py"], tmp_path) == [f"{path} {path}"]


@pytest.mark.long
@pytest.mark.slow
def test_a_forked_child_may_initialize_rpc(tmp_path: Path) -> None:
    """Its parent's worker is not its own."""
    (tmp_path / "script.py").write_text(
        "import os\n"
        "import torch.distributed.rpc as rpc\n"
        "def init(path):\n"
        "    options = rpc.TensorPipeRpcBackendOptions(init_method=f'file://{os.getcwd()}/{path}')\n"
        "    rpc.init_rpc('me', rank=0, world_size=1, rpc_backend_options=options)\n"
        "init('parent')\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    init('child')\n"
        "print(rpc.rpc_sync('me', os.getpid) == os.getpid(), flush=True)\n"
        "rpc.shutdown()\n"
        "if child:\n"
        "    os.wait()\n"
    )
    assert run(["-m", "aiorpc.compat.torch", "script.py"], tmp_path) == ["True", "True"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
def test_a_shutdown_that_is_over_before_all_have_come(late: int, tmp_path: Path) -> None:
    """RuntimeError at those that did not want to wait longer, in that time; those that come late leave like others."""
    (tmp_path / "script.py").write_text(
        "import os, sys, time\n"
        "import torch.distributed.rpc as rpc\n"
        "late, child = int(sys.argv[1]), os.fork()\n"
        "rank = late if child else 1 - late\n"
        "options = rpc.TensorPipeRpcBackendOptions(init_method=f'file://{os.getcwd()}/store')\n"
        "rpc.init_rpc(f'worker{rank}', rank=rank, world_size=2, rpc_backend_options=options)\n"
        "rpc.api._barrier({'worker0', 'worker1'})\n"
        "if child:\n"
        "    os.wait()\n"
        "    rpc.shutdown()\n"
        "    print('late', flush=True)\n"
        "    sys.exit()\n"
        "began = time.monotonic()\n"
        "try:\n"
        "    rpc.shutdown(timeout=2)\n"
        "except RuntimeError as error:\n"
        "    print(type(error).__name__, 1.9 < time.monotonic() - began, flush=True)\n"
    )
    lines = run(["-m", "aiorpc.compat.torch", "script.py", str(late)], tmp_path)
    assert lines == ["RpcTimeout True", "late"]


@pytest.mark.long
@pytest.mark.slow
def test_a_group_without_a_size(tmp_path: Path) -> None:
    """``init_rpc(name, rank=rank)`` alone, with a place in the environment: workers find each other, as with torch."""
    (tmp_path / "script.py").write_text(
        "import os, sys, threading, time\n"
        "import torch.distributed.rpc as rpc\n"
        "called = threading.Event()\n"
        "def call(rank):\n"
        "    called.set()\n"
        "    return rank + 1\n"
        "os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=sys.argv[1])\n"
        "for name in ('RANK', 'WORLD_SIZE'):\n"
        "    os.environ.pop(name, None)\n"
        "rank = int(os.fork() == 0)\n"
        "rpc.init_rpc(f'worker{rank}', rank=rank)\n"
        "while len(rpc.api._get_current_rpc_agent().get_worker_infos()) < 2:\n"
        "    time.sleep(0.05)\n"
        "print(rank, rpc.rpc_sync(f'worker{1 - rank}', call, (rank,)), flush=True)\n"
        "called.wait()\n"
        "if rank == 0:\n"
        "    os.wait()\n"
        "rpc.shutdown()\n"
    )
    assert sorted(run(["-m", "aiorpc.compat.torch", "script.py", str(free_port())], tmp_path)) == ["0 1", "1 2"]


@pytest.mark.long
@pytest.mark.slow
def test_replicas_that_add_up_gradients_stay_alike(tmp_path: Path) -> None:
    """Passes within DDP's ``no_sync()`` and one without, in one context: all ranks get the average of their sums."""
    (tmp_path / "script.py").write_text(
        "import os, torch\n"
        "import torch.distributed.autograd as autograd, torch.distributed.rpc as rpc\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "rank = int(os.fork() == 0)\n"
        "place = f'file://{os.getcwd()}'\n"
        "options = rpc.TensorPipeRpcBackendOptions(init_method=f'{place}/store')\n"
        "rpc.init_rpc(f'worker{rank}', rank=rank, world_size=2, rpc_backend_options=options)\n"
        "torch.distributed.init_process_group('gloo', init_method=f'{place}/processes', rank=rank, world_size=2)\n"
        "module = DistributedDataParallel(torch.nn.Linear(2, 1))\n"
        "with autograd.context() as context_id:\n"
        "    with module.no_sync():\n"
        "        autograd.backward(context_id, [module(torch.full((1, 2), float(rank))).sum()])\n"
        "    autograd.backward(context_id, [module(torch.full((1, 2), float(rank + 1))).sum()])\n"
        "    gradients = autograd.get_gradients(context_id)\n"
        "    print([gradients[each].flatten().tolist() for each in module.parameters()], flush=True)\n"
        "rpc.shutdown()\n"
        "torch.distributed.destroy_process_group()\n"
    )
    assert run(["-m", "aiorpc.compat.torch", "script.py"], tmp_path) == ["[[2.0, 2.0], [2.0]]"] * 2


@pytest.mark.long
@pytest.mark.slow
def test_parameters_that_only_other_replicas_use(tmp_path: Path) -> None:
    """With ``find_unused_parameters`` contexts get what ``.grad`` gets without them, and ``.grad`` stays as it was."""
    (tmp_path / "script.py").write_text(
        "import os, torch\n"
        "import torch.distributed.autograd as autograd, torch.distributed.rpc as rpc\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "class Pair(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))\n"
        "    def forward(self, names, x):\n"
        "        return sum((getattr(self, name) * x).sum() for name in names)\n"
        "rank = int(os.fork() == 0)\n"
        "place = f'file://{os.getcwd()}'\n"
        "options = rpc.TensorPipeRpcBackendOptions(init_method=f'{place}/store')\n"
        "rpc.init_rpc(f'worker{rank}', rank=rank, world_size=2, rpc_backend_options=options)\n"
        "torch.distributed.init_process_group('gloo', init_method=f'{place}/processes', rank=rank, world_size=2)\n"
        "plain, module = (DistributedDataParallel(Pair(), find_unused_parameters=True) for _ in range(2))\n"
        "for each in module.parameters():\n"
        "    each.grad = torch.full((1,), 10.0)\n"
        "with autograd.context() as context_id:\n"
        "    for uses in (('a', 'a'), ('a', 'ab'), ('ab', 'a')):\n"
        "        plain(uses[rank], torch.full((1,), rank + 1.0)).backward()\n"
        "        autograd.backward(context_id, [module(uses[rank], torch.full((1,), rank + 1.0))])\n"
        "        gradients = autograd.get_gradients(context_id)\n"
        "        found = [gradients.get(each) for each in module.parameters()]\n"
        "        assert found == [each.grad for each in plain.parameters()], (uses, found)\n"
        "    print(found, [each.grad.item() for each in module.parameters()], flush=True)\n"
        "rpc.shutdown()\n"
        "torch.distributed.destroy_process_group()\n"
    )
    lines = run(["-m", "aiorpc.compat.torch", "script.py"], tmp_path)
    assert lines == ["[tensor([4.5000]), tensor([1.5000])] [10.0, 10.0]"] * 2


@pytest.mark.slow
@pytest.mark.long
def test_not_over_torchs_own_rpc(tmp_path: Path) -> None:
    """`install` is refused while torch's RPC is initialized."""
    (tmp_path / "script.py").write_text(
        "import os\n"
        "import torch.distributed.rpc as rpc\n"
        "from aiorpc.compat.torch import install, installed\n"
        "options = rpc.TensorPipeRpcBackendOptions(init_method=f'file://{os.getcwd()}/store')\n"
        "rpc.init_rpc('me', rank=0, world_size=1, rpc_backend_options=options)\n"
        "try:\n"
        "    install()\n"
        "except RuntimeError as error:\n"
        "    print(installed(), error)\n"
        "rpc.shutdown()\n"
        "install()\n"
    )
    said = "False install() while RPC is initialized: shut RPC down first"
    assert run(["script.py"], tmp_path) == [said]


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "usage: python -m aiorpc.compat.torch"),
        (["none.py"], "python -m aiorpc.compat.torch: cannot open 'none.py': No such file or directory\n"),
    ],
)
def test_what_cannot_be_run(arguments: list[str], said: str) -> None:
    """The command line says how it is used, and which file is not there, as Python itself does."""
    done = subprocess.run(
        [sys.executable, "-m", "aiorpc.compat.torch", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120 * busy(),
    )
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr


# `begin` calls a handler of worker1 that calls worker2 twice; worker0 dies during the first of these.
ORPHANS = """
import os
import sys
import threading
import time

import torch.distributed.rpc as rpc

ENTERED, RELEASED, ENDED, WATCHES = (threading.Event() for _ in range(4))


def holds():
    ENTERED.set()
    RELEASED.wait(60)


def calls_twice():
    for _ in range(2):
        rpc.rpc_sync("worker2", holds)
    print("went on", flush=True)
    ENDED.set()
    raise ValueError("its own error")


def is_served(name):
    node = rpc.api._get_current_rpc_agent().worker._node
    return any(service.record.name == name for service in node.services)


def run(rank, path, how):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    if rank == 0:
        kept = getattr(rpc, how)("worker1", calls_twice)
        while not rpc.rpc_sync("worker1", watches):
            time.sleep(0.01)
        os._exit(0)
    if rank == 1:
        while not rpc.rpc_sync("worker2", entered):
            time.sleep(0.01)
        WATCHES.set()
        while is_served("worker0"):
            time.sleep(0.01)
        rpc.rpc_sync("worker2", release)
        assert ENDED.wait(60)
    rpc.shutdown()


def entered():
    return ENTERED.is_set()


def release():
    RELEASED.set()


def watches():
    return WATCHES.is_set()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["remote", "rpc_async"])
def test_a_handler_goes_on_when_its_caller_dies(how: str, tmp_path: Path) -> None:
    """Also where it waits in a call of its own, as with torch; its error is printed where it ran, and logged."""
    (tmp_path / "orphans.py").write_text(ORPHANS)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(3):
        code = f"import orphans; orphans.run({rank}, {str(tmp_path / 'store')!r}, {how!r})"
        (tmp_path / f"main{rank}.py").write_text(code)
        command = [sys.executable, "-m", "aiorpc.compat.torch", str(tmp_path / f"main{rank}.py")]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True))
    outputs = [process.communicate(timeout=120 * busy()) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    said, errors = outputs[1]
    assert said == "went on\n"
    assert "On WorkerInfo(id=1, name=worker1):\nValueError('its own error')\nTraceback" in errors
    assert "calls_twice, called by worker worker0, raised ValueError: its own error" in errors
    assert errors.count("Traceback") == 1


def test_a_child_without_torch_pays_for_nothing(tmp_path: Path) -> None:
    """What a Python process is prepared with imports nothing that it has not imported itself, until torch comes."""
    # Without `site`, and what installed packages have it import, which would hide imports of ours.
    code = "import os, sys; before = {*sys.modules}; import sitecustomize; print(*sorted({*sys.modules} - before))"
    assert run(["-S", "-c", code], tmp_path, SITE) == ["sitecustomize"]


def test_a_program_that_does_not_use_the_drop_in_sees_nothing_of_it(tmp_path: Path) -> None:
    """Importing aiorpc imports nothing of it, and leaves imports, the environment and spawned children as they are."""
    code = (
        "import os, sys, multiprocessing.spawn as spawn; import torch\n"
        "def seen(): return [*map(id, sys.meta_path)], [*sys.path], {**os.environ}, spawn.get_preparation_data\n"
        "before = seen(); import aiorpc\n"
        "print(seen() == before, 'sitecustomize' in sys.modules, any('compat' in name for name in sys.modules if "
        "name.startswith('aiorpc')))"
    )
    assert run(["-S", "-c", code], tmp_path, os.pathsep.join([str(ROOT), *sys.path])) == ["True False False"]
