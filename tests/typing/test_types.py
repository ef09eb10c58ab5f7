"""What checkers say of programs that use aiorpc, and of aiorpc itself: results have types, as have public names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import busy

ROOT = Path(__file__).resolve().parent.parent.parent
CASES = ("tests/typing/calls.py", "tests/typing/handles.py")

pytest.importorskip("mypy", reason="mypy is of the extra dev")
pytest.importorskip("pyright", reason="pyright is of the extra dev")


def run(module: str, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a checker with this Python, whose packages it then finds, and aiorpc as it stands here."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200 * busy())


@pytest.mark.slow
def test_mypy_sees_results_and_wrong_arguments() -> None:
    """Each case has the type that it says, and each line that is marked has an error."""
    seen = run("mypy", *CASES)
    assert seen.returncode == 0, seen.stdout + seen.stderr


@pytest.mark.slow
def test_pyright_sees_results_and_wrong_arguments() -> None:
    """The same with pyright."""
    seen = run("pyright", *CASES)
    assert seen.returncode == 0, seen.stdout + seen.stderr


@pytest.mark.slow
def test_every_public_name_has_a_type(tmp_path: Path) -> None:
    """pyright finds no public name, parameter or attribute whose type it does not know."""
    seen = run("pyright", "--verifytypes", "aiorpc", "--ignoreexternal", "--outputjson", cwd=tmp_path)
    report = json.loads(seen.stdout)["typeCompleteness"]
    lacking = [
        f"{symbol['name']}: {said['message']}"
        for symbol in report["symbols"]
        if not symbol["isTypeKnown"]
        for said in symbol["diagnostics"]
    ]
    assert Path(report["packageRootDirectory"]).resolve() == ROOT / "aiorpc"
    assert not lacking
    assert report["completenessScore"] == 1
