"""batch_rl, as its users run it: blocking and async, batched and not, alone and under torchrun, undisturbed and not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from aiorpc.examples import batch_rl
from tests.examples.programs import Program, is_png, run_all, run_program, started, torchrun, usage_error

pytestmark = pytest.mark.slow
MODULE = "aiorpc.examples.batch_rl"
SMALL = ("--num-episode", "2", "--num-steps", "30")
LIMIT = 100.0  # seconds for a program that takes about five
#: Long enough to be disturbed.
ENDLESS = ("-m", MODULE, "--world-size", "3", "--num-episode", "1000000", "--num-steps", "50", "--timeout", "50")

VARIANTS: dict[str, dict[str, Any]] = {
    "batched": {},
    "batched again": {},
    "unbatched": {"batch": False},
    "async batched": {"use_async": True},
    "async unbatched": {"use_async": True, "batch": False},
    "torch batched": {"backend_module": "bench.torch_examples"},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All variants of a small run, by name, one after the other in one program."""
    common = {"world_size": 3, "num_episode": 3, "num_steps": 40, "show": False, "timeout": LIMIT}
    settings = [{**common, **variant} for variant in VARIANTS.values()]
    found = run_all(MODULE, settings, tmp_path_factory.mktemp("anywhere"), timeout=2 * LIMIT).results
    return dict(zip(VARIANTS, found, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_plays_all_its_steps(results: dict[str, dict[str, Any]], name: str) -> None:
    """Two observers, three episodes of forty steps; the result says so, with a reward for each episode."""
    result = results[name]
    assert (result["observers"], result["steps"]) == (2, 2 * 3 * 40)
    assert len(result["rewards"]) == len(result["running_rewards"]) == len(result["seconds"]) == 3
    assert all(5 <= reward <= 40 for reward in result["rewards"])
    assert result["steps_per_s"] > 0 and result["median_steps_per_s"] > 0


@pytest.mark.long
def test_a_seed_gives_the_same_rewards_again(results: dict[str, dict[str, Any]]) -> None:
    """Batched: whatever the order of the calls, and whichever way the program is written."""
    assert results["batched"]["rewards"] == results["batched again"]["rewards"]
    assert results["batched"]["rewards"] == results["async batched"]["rewards"]


@pytest.mark.long
def test_torch_rpc_gives_the_same_rewards(results: dict[str, dict[str, Any]]) -> None:
    """The same program on torch.distributed.rpc: what is compared is the same work."""
    assert results["batched"]["rewards"] == results["torch batched"]["rewards"]


@pytest.mark.long
def test_the_program_shows_progress_and_speed(tmp_path: Path) -> None:
    """What is started, a line for each episode, one for the whole run, a picture, and nothing on stderr."""
    command = ["-m", MODULE, "--world-size", "3", *SMALL, "--picture", "new/rl.png"]
    outcome = run_program(command, tmp_path, timeout=LIMIT)
    assert (outcome.code, outcome.err) == (0, "")
    first, *lines = outcome.out.splitlines()
    assert first.startswith("CartPole-v1: starting an agent and 2 observers, 2 episodes of 30 steps each")
    assert [line.split()[:3] for line in lines[:2]] == [["episode", "1", "reward"], ["episode", "2", "reward"]]
    assert re.fullmatch(r"2 observers, batched: 120 steps in .* steps/s; reward .* -> .*", lines[2])
    assert lines[3:] == ["wrote new/rl.png"]
    assert is_png(tmp_path / "new" / "rl.png")


@pytest.mark.long
def test_it_runs_unchanged_under_torchrun(tmp_path: Path) -> None:
    """torchrun starts the workers, its environment says which; only rank 0 speaks."""
    outcome = run_program(torchrun(2, "-m", MODULE, *SMALL), tmp_path, timeout=LIMIT)
    assert outcome.code == 0, outcome.err
    assert [line.split()[0] for line in outcome.out.splitlines()] == ["episode", "episode", "1"]


def test_a_killed_observer_ends_the_run_and_is_named(tmp_path: Path) -> None:
    """Within seconds there is an error that names the worker, exit code 1, and no process left."""
    with started(ENDLESS, tmp_path) as program:
        program.wait_for_line("episode")
        worker = _workers(program)[-1]
        killed = time.monotonic()
        os.kill(worker, signal.SIGKILL)
        outcome = program.finish(LIMIT)
        assert time.monotonic() - killed < 20.0
        assert outcome.code == 1
        assert f"error: observer2 (rank 2, pid {worker}): was killed by SIGKILL" in outcome.err


@pytest.mark.long
def test_ctrl_c_ends_all_workers(tmp_path: Path) -> None:
    """One line, exit code 130, no traceback, and no process left; as from a terminal the signal reaches all of them."""
    with started(ENDLESS, tmp_path) as program:
        program.wait_for_line("episode")
        os.killpg(program.process.pid, signal.SIGINT)
        outcome = program.finish(20.0)
        assert outcome.code == 130
        assert outcome.err.splitlines()[-1] == "interrupted" and "Traceback" not in outcome.err


@pytest.mark.long
def test_workers_end_with_a_killed_program(tmp_path: Path) -> None:
    """Even SIGKILL of the program leaves no worker and no file behind."""
    with started(ENDLESS, tmp_path) as program:
        program.wait_for_line("episode")
        program.process.kill()
        program.process.wait(20.0)


@pytest.mark.parametrize("wrong", [("--world-size", "1"), ("--num-steps", "1"), ("--num-episode", "0")])
def test_what_cannot_be_run_is_refused(capsys: pytest.CaptureFixture[str], wrong: tuple[str, str]) -> None:
    """A usage error that names the option, before anything is started."""
    assert f"error: {wrong[0]} must be" in usage_error(batch_rl.main, wrong, capsys)


def _workers(program: Program) -> list[int]:
    """Process ids of the workers, by rank: the children of the fork server, which forks them in that order.

    Ids follow each other but for the highest one, after which the system begins again.
    """
    answer = subprocess.run(["ps", "-eo", "pid,ppid,sid"], capture_output=True, text=True, check=True, timeout=10.0)
    parents = {}
    for line in answer.stdout.splitlines()[1:]:
        pid, parent, session = map(int, line.split())
        if session == program.process.pid:
            parents[pid] = parent
    servers = {pid for pid, parent in parents.items() if parent == program.process.pid}
    return sorted((pid for pid, parent in parents.items() if parent in servers), key=lambda pid: (_started(pid), pid))


def _started(pid: int) -> int:
    """When a process began, in ticks of the system's clock: proc(5)."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
