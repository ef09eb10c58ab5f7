"""The package as installed: importing it has no effects, the wheel has everything."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests.limits import busy

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "aiorpc"

# torch comes first: what its import starts is its own. Audit events are raised by the interpreter itself.
WATCH_IMPORT = """
import os, sys, threading
import torch, numpy, msgpack, cloudpickle, uvloop, asyncio

WATCHED = {"socket.__new__", "socket.bind", "subprocess.Popen", "os.fork", "os.posix_spawn"}
seen = []
start = threading.Thread.start  # Python 3.11 has no audit event for it
threading.Thread.start = lambda thread: (seen.append("threading.Thread.start"), start(thread))
sys.addaudithook(lambda event, args: event in WATCHED and seen.append(event))

def descriptors():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # the one that listed the folder
            pass
    return sorted(found)

before = descriptors()
tasks = len(os.listdir("/proc/self/task"))
COMMAND
if len(os.listdir("/proc/self/task")) > tasks:
    seen.append("a thread")
if threading.enumerate() != [threading.main_thread()]:
    seen.append(f"threads {threading.enumerate()}")
seen += [target for target in descriptors() if target not in before]
print(seen)
"""


def run_python(*arguments: str, cwd: Path, path: Path) -> str:
    """Standard output of a Python that finds packages in ``path`` first."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=50 * busy())
    assert done.returncode == 0, done.stderr
    return done.stdout


def watch(command: str, cwd: Path) -> str:
    """What running ``command`` started: threads, sockets, loops, processes."""
    return run_python("-c", WATCH_IMPORT.replace("COMMAND", command), cwd=cwd, path=ROOT).strip()


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to see an event loop's descriptors")
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("threading.Thread(target=int).start()", "threading.Thread.start"),
        ("loop = asyncio.new_event_loop()", "socket.__new__"),
        ("loop = uvloop.new_event_loop()", "anon_inode:[eventpoll]"),
    ],
)
def test_watch_sees_what_it_watches_for(command: str, expected: str, tmp_path: Path) -> None:
    """A started thread, an asyncio loop and a uvloop loop are each noticed."""
    assert expected in watch(command, tmp_path)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to see an event loop's descriptors")
def test_import_starts_nothing(tmp_path: Path) -> None:
    """Importing aiorpc starts no thread, event loop, socket or process."""
    assert watch("import aiorpc", tmp_path) == "[]"


def test_nothing_is_drawn_from_random() -> None:
    """Ids and secrets cannot come from a generator that programs seed equally on all ranks.

    Pauses between tries are neither; each worker draws them from a generator of its own.
    """
    pauses = {PACKAGE / "protocol" / "retries.py", PACKAGE / "runtime" / "caller" / "retrying.py"}
    users = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        if "examples" not in path.parts and path not in pauses
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Import) and any(alias.name == "random" for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and node.module == "random")
    ]
    assert users == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the sources here."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50 * busy())
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's contents, as an installer would lay them out."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_wheel_has_the_whole_package_and_nothing_else(installed: Path) -> None:
    """Every file under aiorpc is in it: modules, py.typed, data; pytest's plugin; neither tests nor benchmarks."""
    packed = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file()}
    source = {
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }
    assert {"aiorpc/py.typed", "aiorpc/__init__.py", "aiorpc/examples/batch_rl.py"} <= source
    assert {name for name in packed if ".dist-info/" not in name} == {*source, "pytest_aiorpc.py"}


def test_wheel_describes_itself(installed: Path) -> None:
    """Name, version, Python and the licence are those of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (metadata,) = installed.glob("*.dist-info/METADATA")
    fields: Message = Parser().parsestr(metadata.read_text())
    described = [fields[name] for name in ("Name", "Version", "Requires-Python", "License-Expression")]
    assert described == [project["name"], project["version"], project["requires-python"], "BSD-3-Clause"]
    assert {"examples", "test", "fuzz", "neighbours", "bench", "dev"} == set(fields.get_all("Provides-Extra", []))


@pytest.mark.long
def test_installed_example_runs_from_any_folder(installed: Path, tmp_path: Path) -> None:
    """What the wheel installs is found and runs outside the project."""
    where = run_python("-c", "import aiorpc; print(aiorpc.__file__)", cwd=tmp_path, path=installed)
    assert where.strip() == str(installed / "aiorpc" / "__init__.py")
    assert "--world-size" in run_python("-m", "aiorpc.examples.batch_rl", "--help", cwd=tmp_path, path=installed)
