"""actor_learner: what is learned, without RPC; the program as its users run it, undisturbed and with actors killed."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.examples.programs import RUN_ALL, run_program, started
from tests.ports import free_port

MODULE = "aiorpc.examples.actor_learner"
LIMIT = 400.0  # seconds for a run to the end, on a slow machine


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


@pytest.mark.slow
@pytest.mark.time_limit(200)
def test_a_learner_that_is_asked_to_go_is_missed(tmp_path: Path) -> None:
    """Its launcher replaces what ends with another status than 0: that has to be the actors as well, or the next
    learner would wait for them. Samples that no one takes any more delay nobody."""
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = ["-m", MODULE, "--updates", "100000"]
    with (
        started(command, tmp_path, {**env, "RANK": "0"}) as learner,
        started(command, tmp_path, {**env, "RANK": "1"}) as actor,
    ):
        learner.wait_for_line("update ")
        learner.process.terminate()
        since = time.monotonic()
        ended = [each.finish(timeout=60) for each in (learner, actor)]
        assert time.monotonic() - since < 20  # a drain takes up to 25 s
    assert [each.code for each in ended] == [1, 1], ended
    assert "WorkerClosed" in ended[0].err
    assert "PeerLeft" in ended[1].err
