"""Every input that was kept, and some broken ones, to every target; and that a target would notice what it is for."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import pytest

from tests.fuzz import corpora
from tests.fuzz.mutations import mutate
from tests.fuzz.targets import TARGETS, Target
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
