"""CartPole learned by one agent that chooses the actions of many observers in batches.

    python -m aiorpc.examples.batch_rl                      # starts its own workers
    python -m aiorpc.examples.batch_rl --no-batch           # one run of the policy for each observer's step
    python -m aiorpc.examples.batch_rl --async              # the same training loop with async def
    python -m aiorpc.examples.batch_rl --picture rl.png     # and a picture of rewards and speed
    python -m aiorpc.examples.batch_rl --sweep              # both, for 1 to 10 observers: a table and a figure
    torchrun --standalone --nproc-per-node 6 -m aiorpc.examples.batch_rl

With the same seed and batches, a run gives the same rewards again. Without batches the order in which the observers'
calls arrive decides who gets which random numbers, so it does not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.futures import Future

import aiorpc as rpc

from ._shared import rl
from ._shared.launch import launch, place_from_environment
from ._shared.plot import draw_training
from ._shared.program import CommandLine, exit_code, tell
from ._shared.rl import Settings

__all__ = ["Agent", "Settings", "main", "rpc", "run"]

# Not this module: multiprocessing runs it again, as the main module of each child.
PRELOAD = ("gymnasium.envs.classic_control", "rich.progress", "aiorpc.examples._shared.async_rl")

#: Enough for a median; a sweep is about speed, not about learning.
SWEEP_EPISODES = 5


class Agent(rl.AgentBase):
    """The agent whose batched answers are Futures: a waiting caller holds no thread here."""

    @rpc.functions.async_execution
    def select_action_batch(self, observer: int, state: Tensor) -> Future[list[int]]:
        return super().select_action_batch(observer, state)


def run(settings: Settings) -> dict[str, object] | None:
    """Train once and return the result as plain data (under torchrun: on rank 0, None elsewhere).

    Raises: WorkerFailed when a worker died, raised or was not done in ``settings.timeout`` seconds.
    """
    names = [rl.worker_name(rank) for rank in range(settings.world_size)]
    role = rl.blocking_role
    if settings.use_async:
        from ._shared.async_rl import async_role as role
    return launch(role, settings, names, timeout=settings.timeout, preload=PRELOAD)


def lines(result: dict[str, Any]) -> list[str]:
    """What a run has to tell."""
    return [
        f"{_count(result['observers'])}, {'batched' if result['batch'] else 'unbatched'}: "
        f"{result['steps']:,} steps in {result['total_s']:.1f} s, {result['steps_per_s']:,.0f} steps/s; "
        f"reward {result['rewards'][0]:.1f} -> {result['rewards'][-1]:.1f}"
    ]


def command_line() -> CommandLine[Settings]:
    """The command line."""
    default = Settings()
    made = CommandLine(
        "batch_rl", "CartPole learned by one agent that chooses the actions of many observers in batches.", default
    )
    made.option("world_size", "one agent, the rest observers", least=2, why="an agent and an observer")
    episodes = f"default {default.num_episode}, in a sweep {SWEEP_EPISODES}"
    made.option("num_episode", episodes, default=None)
    made.option("num_steps", "steps of an observer in an episode", least=2)
    made.add_argument(
        "--no-batch", dest="batch", action="store_false", help="run the policy for each observer's step alone"
    )
    made.add_argument("--async", dest="use_async", action="store_true", help="the training loop with async def")
    made.common_options(picture="the rewards and the speed")
    made.add_argument("--sweep", action="store_true", help="world sizes 2 to 11, batched and unbatched")
    made.add_argument("--out", default="bench/results/batch_rl", help="where --sweep writes OUT.json and OUT.png")
    made.option("backend_module", argparse.SUPPRESS)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit code."""
    commands = command_line()
    arguments = commands.parse(argv)
    if arguments.num_episode is None:
        arguments.num_episode = SWEEP_EPISODES if arguments.sweep else Settings().num_episode
    if arguments.num_episode < 1:
        commands.error("--num-episode must be at least 1")
    if arguments.sweep and place_from_environment() is not None:
        commands.error("--sweep starts its own workers: run it without torchrun")
    settings = commands.settings(arguments)
    if arguments.sweep:
        commands.check_picture("--out", Path(f"{arguments.out}.png"))
        return exit_code(lambda: _sweep(settings, arguments.out))
    return exit_code(lambda: _run_and_tell(settings, arguments.picture))


def _sweep(settings: Settings, out: str) -> None:
    from ._shared.sweep import sweep

    sweep(run, settings, out)


def _run_and_tell(settings: Settings, picture: str | None) -> None:
    if place_from_environment() is None:
        print(_announcement(settings), flush=True)
    tell(run(settings), lines, draw_training, picture)


def _count(observers: int) -> str:
    return f"{observers} observer{'s' if observers > 1 else ''}"


def _announcement(settings: Settings) -> str:
    return (
        f"CartPole-v1: starting an agent and {_count(settings.world_size - 1)}, "
        f"{settings.num_episode} episodes of {settings.num_steps} steps each, "
        f"{'one run of the policy for all' if settings.batch else 'a run of the policy for each'}"
        f"{', with async def' if settings.use_async else ''}"
    )


if __name__ == "__main__":
    # By its real name, not __main__: classes and functions travel to the other workers by name.
    from aiorpc.examples import batch_rl

    sys.exit(batch_rl.main())
