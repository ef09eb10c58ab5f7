"""actor_learner: what is learned, without RPC; the program as its users run it, undisturbed and with actors killed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from aiorpc.examples import actor_learner
from aiorpc.examples._shared.actor_critic import GAMMA, LAMBDA, Fragment, Learner, advantages
from aiorpc.examples._shared.launch import WorkerFailed
from tests.examples.programs import RUN_ALL, run_program, usage_error

MODULE = "aiorpc.examples.actor_learner"
LIMIT = 400.0  # seconds for a run to the end, on a slow machine


def test_advantages_are_discounted_surprises() -> None:
    """Each is the surprise of its step, and those behind it, each worth less; none reaches over the end of a game."""
    values = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    rewards, ended = torch.ones(3, 1), torch.tensor([[False], [True], [False]])
    third = 1.0 + GAMMA * 4.0 - 3.0
    second = 1.0 - 2.0
    first = 1.0 + GAMMA * 2.0 - 1.0 + GAMMA * LAMBDA * second
    assert advantages(values, rewards, ended).flatten().tolist() == pytest.approx([first, second, third])


def test_the_learner_prefers_what_was_rewarded() -> None:
    """What it has learned from fragments in which one action is rewarded is to take that one."""
    learner = Learner(seed=3)
    for _ in range(20):
        states = torch.randn(33, 4, 4)
        with torch.no_grad():
            logs, _ = learner.policy(states[:-1])
        actions = torch.multinomial(logs.exp().reshape(-1, 2), 1).reshape(32, 4)
        chosen = logs.gather(2, actions.unsqueeze(2)).squeeze(2)
        ended = torch.ones(32, 4, dtype=torch.bool)
        learner.learn([Fragment(states, actions, chosen, actions.float(), ended, version=0)])
    with torch.no_grad():
        assert learner.policy(torch.randn(100, 4))[0].exp()[:, 1].mean() > 0.9


@pytest.mark.slow
@pytest.mark.time_limit(200)
def test_a_few_updates(tmp_path: Path) -> None:
    """It ends when it has made them, tells how it went, and draws that."""
    command = ["-m", MODULE, "--actors", "2", "--games", "2", "--updates", "3", "--picture", "al.png"]
    outcome = run_program(command, tmp_path, timeout=180)
    assert outcome.code == 0, outcome.err
    first, *updates, last, wrote = outcome.out.splitlines()
    assert first == "CartPole-v1: a learner and 2 actors with 2 games each"
    assert updates and all(line.startswith("update ") for line in updates)
    assert re.fullmatch(r"2 actors: not solved, 3 updates, \d+ games, 1,536 steps, .*", last), last
    assert wrote == "wrote al.png"
    assert (tmp_path / "al.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
@pytest.mark.time_limit(LIMIT + 20)
@pytest.mark.parametrize("chaos", [0.0, 3.0], ids=["undisturbed", "actors killed"])
def test_it_solves_cartpole(tmp_path: Path, chaos: float) -> None:
    """A mean of 475 over a hundred games, also where an actor is killed every three seconds."""
    settings = {"chaos": chaos, "updates": 300, "show": False, "timeout": LIMIT - 20}
    outcome = run_program(["-c", RUN_ALL, MODULE, json.dumps([settings])], tmp_path, timeout=LIMIT)
    assert outcome.code == 0, outcome.err
    (result,) = json.loads(outcome.out.splitlines()[-1])
    assert result["solved_at"] is not None, result["rewards"][-1]
    assert bool(result["kills"]) == bool(chaos)
    assert max(result["ages"]) < 30  # nobody goes on with weights that are long gone


def test_actors_that_die_of_themselves_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are named, though no sample ever came."""
    monkeypatch.setattr(actor_learner, "_actor", exit_at_once)
    with pytest.raises(WorkerFailed, match=r"actor\d \(pid \d+\) exited with code 3"):
        actor_learner.run(actor_learner.Settings(actors=1, show=False, timeout=60))


def exit_at_once(*_: object) -> None:
    sys.exit(3)


@pytest.mark.parametrize(
    "wrong", [["--actors", "0"], ["--chaos", "-1"], ["--chaos", "nan"], ["--batch", "0"]], ids="=".join
)
def test_what_cannot_be_run_is_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is started."""
    assert f"error: {wrong[0]} " in usage_error(actor_learner.main, wrong, capsys)
