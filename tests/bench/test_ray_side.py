"""Ray's side, as far as it can be tried without Ray: that it is left out with a line, and that nothing of it stays."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import publishing, queues, ray_side
from bench.stats import BenchError


class Stage:
    """What the measurements need of one, and how often it let nobody run."""

    null = False
    plan = SimpleNamespace(seconds=0.1)

    def __init__(self) -> None:
        self.pauses = 0
        self.cases: dict[str, Callable[[], Any]] = {}

    @contextlib.contextmanager
    def start(self, *_: object) -> Any:
        yield SimpleNamespace(names=["one", "two"], run=lambda *_, **__: 10.0)

    def pause(self) -> None:
        self.pauses += 1

    def alternate(self, cases: dict[str, Any]) -> dict[str, list[dict[str, float]]]:
        found = {label: [{"rate": 20.0}] for label in cases if label != "ray"}
        return found | {label: [cases[label]()] for label in cases if label == "ray"}

    def alternate_anew(self, cases: dict[str, Any]) -> dict[str, list[dict[str, float]]]:
        if "rest" in cases:
            return {"rest": [{"memory": 1.0, "cost": 1.0}]}
        return {label: [case()] for label, case in cases.items()}


@pytest.fixture
def environments(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Ray as if it were installed; what each of its runs finds in its environment."""
    found: list[dict[str, str]] = []

    def run(measurement: str, *, environment: dict[str, str] | None = None, **_: object) -> dict[str, float]:
        found.append(environment or {})
        return {"ms": 50.0} if measurement == "publish" else {"one": 1.0, "many": 4.0}

    monkeypatch.setattr(ray_side, "installed", lambda _: True)
    monkeypatch.setattr(ray_side, "run", run)
    return found


def test_without_ray_a_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And how it is installed; both measurements are taken without it, and nothing is compared."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for take in (publishing.publish, queues.queue):
        rows = take(Stage())  # type: ignore[arg-type]  # what it needs of one
        assert not [row for row in rows if row.against]
        assert ".[bench]" in capsys.readouterr().err
        assert take is publishing.publish or not [row for row in rows if row.target]


def test_published_values_are_compared_with_ray(environments: list[dict[str, str]]) -> None:
    """As Ray is by itself, with a target, and as it is where tensors are not copied for each reader."""
    stage = Stage()
    rows = publishing.publish(stage)  # type: ignore[arg-type]  # what it needs of one
    compared = [row for row in rows if row.against]
    assert [(row.against, row.ratios, row.passed) for row in compared] == [
        ("Ray", (5.0,), True),
        ("Ray, zero copies", (5.0,), None),
    ]
    assert environments == list(publishing.RAY_WAYS.values())
    assert stage.pauses == 2


@pytest.mark.usefixtures("environments")
def test_small_items_are_compared_with_ray() -> None:
    """One at a time and many: each with its target."""
    stage = Stage()
    rows = queues.queue(stage)  # type: ignore[arg-type]  # what it needs of one
    assert [(row.ratios, row.passed) for row in rows if row.against] == [((20.0,), True), ((5.0,), False)]
    assert stage.pauses == 1


def stand_in(monkeypatch: pytest.MonkeyPatch, program: str) -> list[str]:
    """Have `run` start this program in the place of Ray's; the commands that it was given."""
    commands: list[str] = []
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
        commands.extend(command)
        return popen([sys.executable, "-c", program, *command[3:]], **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    return commands


def test_figures_come_back_and_nothing_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither the folder nor a process that the program started."""
    pid = tmp_path / "pid"
    program = (
        "import json, os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], stdout=subprocess.DEVNULL,"
        " stderr=subprocess.DEVNULL)\n"
        "assert os.path.isdir(sys.argv[2])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "print('something else')\n"
        "print(json.dumps({'ms': json.loads(sys.argv[3])['size'], 'way': float(os.environ['WAY'])}))\n"
    )
    commands = stand_in(monkeypatch, program)
    assert ray_side.run("publish", environment={"WAY": "2"}, size=8) == {"ms": 8, "way": 2.0}
    assert not Path(commands[4]).exists()
    assert not is_running(int(pid.read_text()))


def is_running(pid: int) -> bool:
    """Whether there is such a process; one that nobody has asked for yet has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_failure_is_told_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the folder goes."""
    commands = stand_in(monkeypatch, "import sys; sys.exit('no room in the object store')")
    with pytest.raises(BenchError, match="no room in the object store"):
        ray_side.run("queue")
    assert not Path(commands[4]).exists()


def test_a_run_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its limit, which the error names."""
    commands = stand_in(monkeypatch, "import time; time.sleep(600)")
    with pytest.raises(BenchError, match=r"more than 0\.1 s"):
        ray_side.run("queue", limit=0.1)
    assert not Path(commands[4]).exists()
