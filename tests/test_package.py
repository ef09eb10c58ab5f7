"""The package as installed: importing it has no effects, a release has everything and runs."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

import aiorpc
from aiorpc._installed import THEIRS
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


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to see an event loop's descriptors")
def test_import_starts_nothing(tmp_path: Path) -> None:
    """Importing aiorpc starts no thread, event loop, socket or process."""
    assert watch("import aiorpc", tmp_path) == "[]"


def test_nothing_is_drawn_from_random() -> None:
    """Ids and secrets cannot come from a generator that programs seed equally on all ranks.

    Pauses between tries are neither; each worker draws them from a generator of its own.
    """
    pauses = {
        PACKAGE / "protocol" / "retries.py",
        PACKAGE / "runtime" / "caller" / "retrying.py",
        PACKAGE / "runtime" / "meeting" / "free.py",
    }
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
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a release has: a source archive, and the wheel built from what is in that, as by `build`."""
    folder = tmp_path_factory.mktemp("built")
    make("sdist", ROOT, folder)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    make("wheel", unpacked, folder)
    return folder


def make(target: str, source: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=50 * busy())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def environment(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh virtual environment into which pip has installed the wheel, and nothing else.

    What aiorpc depends on is taken from the environment of the tests, where torch is. `installed` and the interpreter's
    own path come first there, so aiorpc is the one of the wheel.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (wheel,) = built.glob("*.whl")
    command = [sys.executable, "-m", "pip", "--python", str(folder), "install", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100 * busy())
    assert done.returncode == 0, done.stdout + done.stderr
    # Appended to the path by `site`: behind what is installed here.
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return folder / "bin" / "python"


def site_packages(environment: Path) -> Path:
    (site,) = environment.parent.parent.glob("lib/python*/site-packages")
    return site


def run_installed(environment: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program as a user who has installed aiorpc: nothing of the checkout is on the path."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    command = [str(environment), *arguments]
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=100 * busy())
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def project() -> dict[str, Any]:
    declared: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return declared


def metadata(environment: Path) -> Message:
    (found,) = site_packages(environment).glob("aiorpc*.dist-info/METADATA")
    fields: Message = Parser().parsestr(found.read_text())
    return fields


def test_wheel_has_the_whole_package_and_nothing_else(environment: Path) -> None:
    """Each file of aiorpc is installed: modules, py.typed, data. Beside it lie plugins of pytest alone, and no .pth."""
    site = site_packages(environment)
    installed = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    source = {
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }
    assert {"aiorpc/py.typed", "aiorpc/__init__.py", "aiorpc/examples/batch_rl.py"} <= source
    plugins = {f"{module}.py" for module in project().get("entry-points", {}).get("pytest11", {}).values()}
    assert {name for name in installed if ".dist-info/" not in name} == source | plugins | {"dependencies.pth"}


def test_the_source_archive_has_what_builds_and_tests_it(built: Path) -> None:
    """Tests, documents and programs are in it, and nothing that was built or fetched."""
    (unpacked,) = (built / "unpacked").iterdir()
    for name in ("LICENSE", "Makefile", "constraints.txt", "docs", "tests/conftest.py", "bench/results"):
        assert (unpacked / name).exists(), name
    assert not (unpacked / ".venv").exists()
    assert sum(path.stat().st_size for path in built.glob("*.tar.gz")) < 16 << 20


def test_wheel_describes_itself(environment: Path) -> None:
    """Name, version, Python and the licence are those of pyproject.toml, and pages of the project are named."""
    fields, declared = metadata(environment), project()
    described = [fields[name] for name in ("Name", "Requires-Python", "License-Expression", "License-File")]
    assert described == ["aiorpc-torch", declared["requires-python"], "BSD-3-Clause", "LICENSE"]
    assert set(declared["optional-dependencies"]) == set(fields.get_all("Provides-Extra", []))
    links = dict(link.split(", ", 1) for link in fields.get_all("Project-URL", []))
    assert links == declared["urls"]
    assert fields["Maintainer"]


def test_the_package_index_shows_a_readme_whose_links_lead_somewhere(environment: Path) -> None:
    """There are no files beside it there: links and pictures are those of the repository, at the tag of the version."""
    text = metadata(environment).get_payload()
    assert isinstance(text, str)
    targets = re.findall(r"\]\(([^)]+)\)|src=\"([^\"]+)\"", text)
    assert len(targets) > 5
    assert [link or source for link, source in targets if not (link or source).startswith(("https://", "#"))] == []
    assert f"(https://github.com/aiorpc/aiorpc/blob/v{aiorpc.__version__}/SECURITY.md)" in text


def test_the_version_stands_in_one_place(environment: Path) -> None:
    """The distribution and the package have the version of `_version.py`."""
    (written,) = re.findall(r'^__version__ = "(.*)"$', (PACKAGE / "_version.py").read_text(), re.MULTILINE)
    assert metadata(environment)["Version"] == aiorpc.__version__ == written
    text = (ROOT / "pyproject.toml").read_text()
    assert written not in text


def test_a_small_program_runs_where_the_wheel_is_installed(environment: Path, tmp_path: Path) -> None:
    """Two workers of one process call each other, in an environment that has not seen the checkout."""
    program = tmp_path / "program.py"
    program.write_text(
        "import asyncio, torch, aiorpc as rpc\n"
        "from torch.distributed import HashStore\n"
        "async def main():\n"
        "    store = HashStore()\n"
        "    async with rpc.init('a', store=store) as a, rpc.init('b', store=store):\n"
        "        print((await a.call('b', torch.add, torch.ones(2), 1)).tolist(), rpc.__file__)\n"
        "asyncio.run(main())\n"
    )
    done = run_installed(environment, "-W", "error", str(program), cwd=tmp_path)
    assert done.stdout.split("] ") == ["[2.0, 2.0", f"{site_packages(environment) / 'aiorpc' / '__init__.py'}\n"]


@pytest.mark.long
@pytest.mark.parametrize("module", ["aiorpc.examples.batch_rl", "aiorpc"])
def test_programs_that_the_wheel_brings_run_from_any_folder(environment: Path, module: str, tmp_path: Path) -> None:
    """The example of reinforcement learning and the commands are found outside of the project."""
    assert "usage" in run_installed(environment, "-m", module, "--help", cwd=tmp_path).stdout


@pytest.mark.long
def test_the_installed_example_trains(environment: Path, tmp_path: Path) -> None:
    """`python -m aiorpc.examples.batch_rl`, with its workers in processes of their own."""
    arguments = ["--world-size", "2", "--num-episode", "1", "--num-steps", "10"]
    done = run_installed(environment, "-m", "aiorpc.examples.batch_rl", *arguments, cwd=tmp_path)
    assert "1" in done.stdout


def test_the_other_aiorpc_beside_this_one_is_told(environment: Path, tmp_path: Path) -> None:
    """Where the other distribution of that import name lies in the same folder, importing says so, and what to do."""
    other = tmp_path / "site"
    shutil.copytree(site_packages(environment), other)
    (other / "aiorpc-0.1.7.dist-info").mkdir()
    (other / "aiorpc-0.1.7.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: aiorpc\nVersion: 0.1.7\n")
    code = f"import sys; sys.path.insert(0, {str(other)!r}); import aiorpc; print(aiorpc.__version__)"
    assert not run_installed(environment, "-c", code, cwd=tmp_path).stderr
    (other / "aiorpc" / THEIRS).touch()  # its files and ours, as both installers leave them
    told = run_installed(environment, "-c", code, cwd=tmp_path)
    assert told.stdout.strip() == aiorpc.__version__
    assert "<string>:1: RuntimeWarning" in told.stderr
    assert "pip uninstall -y aiorpc aiorpc-torch; pip install aiorpc-torch" in told.stderr
    assert str(other) in told.stderr


def test_the_look_for_the_other_one_is_for_a_file_that_is_not_ours() -> None:
    """It reads no metadata, and finds nothing in this checkout."""
    assert not (PACKAGE / THEIRS).exists()
