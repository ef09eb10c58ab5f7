"""Every input that was kept, and some broken ones, to every target; and that a target would notice what it is for."""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aiorpc.errors import ProtocolError
from tests.fuzz import corpora, live
from tests.fuzz.mutations import mutate
from tests.fuzz.targets import TARGETS, Target, Taste, simple
from tests.fuzz.trap import PAYLOAD, Sprung, nothing_unpickled

ROOT = Path(__file__).parents[2]
# Broken inputs of a target; of all others as many as MANY.
ROUNDS = {"strangers": 40, "members": 40, "encrypted": 60, "tls": 100, "lives": 100, "parts": 60}
MANY = 400


def kept(target: Target) -> list[bytes]:
    """The inputs of a target that are in the repository."""
    folders = (corpora.FINDINGS, corpora.CORPUS)
    return [*target.seeds(), *(data for folder in folders for data in corpora.read(folder, target.name))]


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_that_were_kept_do_no_harm(name: str) -> None:
    """Seeds, corpus and past findings: some are accepted, and all others refused as documented."""
    target = TARGETS[name]
    with target.open() as taste:
        outcomes = [target.taste(taste, data) for data in kept(target)]
    assert any(outcomes)
    assert not target.allowed or not all(outcomes)


@pytest.mark.random
@pytest.mark.parametrize("name", TARGETS)
def test_broken_copies_do_no_harm(name: str) -> None:
    """The same inputs with changed, lost, doubled and foreign bytes."""
    target = TARGETS[name]
    chance, inputs = random.Random(7), kept(target)
    with target.open() as taste:
        for _ in range(ROUNDS.get(name, MANY)):
            target.taste(taste, mutate(chance.choice(inputs), chance, inputs))


def test_every_file_belongs_to_a_target() -> None:
    """No corpus and no finding is left over from a target of another name."""
    names = {path.stem for folder in (corpora.CORPUS, corpora.FINDINGS) for path in folder.glob("*.txt")}
    assert names <= set(TARGETS)


def test_unpickling_springs_the_trap() -> None:
    """By what is unpickled, and by unpickling anything where nothing may be."""
    with pytest.raises(Sprung):
        pickle.loads(PAYLOAD)
    harmless = pickle.dumps(1)
    with nothing_unpickled(), pytest.raises(Sprung):
        pickle.loads(harmless)
    assert pickle.loads(harmless) == 1


def target_of(taste: Taste) -> Target:
    """A target for such a function."""
    return Target("of a test", "", (ProtocolError,), simple(taste), list)


def test_undocumented_error_is_a_finding() -> None:
    """A documented one is a refusal."""

    def taste(data: bytes) -> None:
        raise ProtocolError if data else KeyError

    target = target_of(taste)
    with target.open() as opened:
        assert not target.taste(opened, b"x")
        with pytest.raises(KeyError):
            target.taste(opened, b"")


def test_unpickling_is_a_finding() -> None:
    """Whatever the input is."""

    def taste(data: bytes) -> None:
        try:
            pickle.loads(data)
        except Exception as error:
            raise ProtocolError from error

    target = target_of(taste)
    with target.open() as opened, pytest.raises(Sprung):
        target.taste(opened, PAYLOAD)


def test_fault_that_the_runtime_reports_is_a_finding() -> None:
    """A callback of the loop that raises while an input is tried."""

    @contextmanager
    def victim() -> Iterator[live.Victim]:
        made = live.Victim(False)
        try:
            yield made
        finally:
            made.close()

    with victim() as opened:
        opened.shoot(b"")
        opened.on_loop(lambda: 1 / 0)
        with pytest.raises(AssertionError, match="ZeroDivisionError"):
            opened.shoot(b"")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.time_limit(300)
def test_command_fuzzes_and_reports(tmp_path: Path) -> None:
    """`python -m tests.fuzz`: a line for the target, and the report adds up over two runs."""
    path = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.fuzz", "families", "--inputs", "2000", "--seed", "1", "--report", str(path)]
    for runs in (1, 2):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "families" in done.stdout and "none" in done.stdout
        report = json.loads(path.read_text())
        assert report["inputs"] >= 1000 * runs and report["findings"] == 0
        assert report["targets"]["families"]["allowed"] == ["ProtocolError"]
