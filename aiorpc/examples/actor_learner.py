"""CartPole learned by one learner from what many actors play, each at its own pace.

    python -m aiorpc.examples.actor_learner                          # starts its own actors, until it is solved
    python -m aiorpc.examples.actor_learner --actors 4 --picture al.png
    python -m aiorpc.examples.actor_learner --chaos                  # kills an actor now and then
    python -m aiorpc.examples.actor_learner --checkpoint al.pt       # goes on from there
    torchrun --standalone --nproc-per-node 4 -m aiorpc.examples.actor_learner

The learner publishes its weights after every update. Actors play with the newest weights that have come, and put their
experience into a queue, which makes them wait when the learner does not keep up. No process waits for another one
otherwise: so the experience was played with weights that are some updates old, which the learner's algorithm (PPO)
corrects for. An actor that dies loses only its present games. Another process takes its name, reads the newest weights,
and goes on.

A launcher (torchrun, srun, mpirun) starts the learner as rank 0 and the actors as the others, on any number of hosts.
If an actor dies, a process with its rank takes its place. A learner that is started again goes on from its checkpoint.

With `--chaos` an actor is killed every few seconds. CartPole counts as solved when the last hundred games were worth
475 on average, of 500.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import aiorpc as rpc
from aiorpc import run as launcher

from ._shared.actor_critic import ActorCritic, Fragment, Games, Learner
from ._shared.launch import EXIT_TIMEOUT, Forked, Place, place_from_environment
from ._shared.plot import draw_actor_learner
from ._shared.program import LONGEST, CommandLine
from ._shared.progress import Steps, bar

PRELOAD = ("torch", "gymnasium.envs.classic_control", "rich.progress", "aiorpc.examples._shared.actor_critic")
#: Games whose mean says how good the policy is, and the least that counts as solved, as the game's authors have it.
LATEST, SOLVED, BEST = 100, 475.0, 500.0
#: Seconds between two lines about the progress, between two kills, and between two looks at the actors.
TELL, KILL, LOOK = 1.0, 5.0, 0.5


@dataclass(frozen=True)
class Settings:
    """The settings of a run. seed: of all generators, in all processes. show: print progress.

    games, steps: an actor plays so many games side by side, and puts so many steps of each into the queue at a time.
    batch: the number of such items in an update. updates: at most. chaos: seconds between two kills; 0: no kills.
    checkpoint: a file that the learner writes after each update, and goes on from if it is there; "": none.
    """

    actors: int = 3
    games: int = 8
    steps: int = 64
    batch: int = 4
    updates: int = 1000
    solved: float = SOLVED
    chaos: float = 0.0
    checkpoint: str = ""
    seed: int = 543
    show: bool = True
    timeout: float = 1800.0


# --- an actor ---------------------------------------------------------------------------------------------------


async def act(name: str, settings: Settings, seed: int) -> None:
    """Play with the newest weights until the learner wants no more. PeerLeft if it has left before that."""
    games, policy = Games(settings.games, seed), ActorCritic()
    async with rpc.init(name, role="actor"):
        samples = rpc.queue("samples", owner="learner", timeout=0)
        with contextlib.suppress(rpc.QueueShutDown):
            async with rpc.subscribe("policy", timeout=0) as versions:
                weights: rpc.types.PublishedVersion[dict[str, torch.Tensor]] | None = await anext(versions)
                while weights is not None:
                    policy.load_state_dict(weights.value, assign=True)
                    version, weights = weights.version, None
                    while weights is None:
                        await samples.put(await asyncio.to_thread(games.play, policy, settings.steps, version))
                        weights = versions.newest()


def meeting_in(folder: str) -> str:
    """Where the workers of a run meet."""
    return f"file://{folder}/meet"


def actors_of(settings: Settings, folder: str) -> launcher.LocalWorkers:
    """The processes of the actors. folder: for the files of the run, those of actors that are killed among them."""
    names = [f"actor{number}" for number in range(settings.actors)]
    seeds = itertools.count(settings.seed + 1)

    def start(rank: int, variables: Mapping[str, str]) -> Forked:
        # Each process plays other games, also the one in place of another.
        work = partial(_actor, names[rank], settings, 1000 * next(seeds))
        return Forked(work, names[rank], folder, variables, PRELOAD)

    return launcher.LocalWorkers(start, names, free=meeting_in(folder), grace=EXIT_TIMEOUT)


def _actor(name: str, settings: Settings, seed: int) -> None:
    """What an actor's process does."""
    with contextlib.suppress(rpc.PeerLeft):  # the learner ends its actors
        asyncio.run(act(name, settings, seed))


# --- the learner --------------------------------------------------------------------------------------------------


@dataclass
class Record:
    """What happened, update by update, as the result of a run. before: updates that the checkpoint already had."""

    settings: Settings
    started: float = field(default_factory=time.monotonic)
    seconds: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    ages: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    lost_items: int = 0
    games: int = 0
    before: int = 0
    _latest: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))

    @property
    def updates(self) -> int:
        """How many there were, with those before this run."""
        return self.before + len(self.rewards)

    @property
    def solved(self) -> bool:
        """Whether the latest games were good enough."""
        return len(self._latest) == LATEST and self.rewards[-1] >= self.settings.solved

    def now(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.started

    def add(self, fragments: Sequence[Fragment], version: int) -> None:
        """Note an update from these. version: of the weights that it began with."""
        for each in fragments:
            self._latest.extend(each.scores)
            self.games += len(each.scores)
        self.seconds.append(self.now())
        self.rewards.append(sum(self._latest) / max(1, len(self._latest)))
        self.ages.append(sum(version - each.version for each in fragments) / len(fragments))
        self.steps.append(sum(each.steps for each in fragments))

    def rates(self) -> list[float]:
        """Steps a second, for each update over the time since the one before."""
        pauses = [end - begin for begin, end in itertools.pairwise([0.0, *self.seconds])]
        return [steps / pause for steps, pause in zip(self.steps, pauses, strict=True)]

    def line(self) -> str:
        """How it goes."""
        latest = sum(self.steps[-10:]) / (self.seconds[-1] - (self.seconds[-11] if len(self.seconds) > 10 else 0.0))
        return (
            f"update {self.updates:4d}   reward {self.rewards[-1]:6.1f} {bar(self.rewards[-1] / BEST)}   "
            f"{latest:7,.0f} steps/s   weights {self.ages[-1]:3.1f} updates old"
            f"{f'   {len(self.kills)} killed' if self.kills else ''}"
        )

    def result(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "program": "actor_learner",
            **asdict(self.settings),
            "solved_at": self.seconds[-1] if self.solved else None,
            "total_steps": sum(self.steps),
            "total_s": self.seconds[-1],
            "seconds": self.seconds,
            "rewards": self.rewards,
            "ages": self.ages,
            "rates": self.rates(),
            "kills": self.kills,
            "games_played": self.games,
            "before": self.before,
            "lost_items": self.lost_items,
        }


async def learn(settings: Settings, meet: str, actors: launcher.LocalWorkers, record: Record) -> None:
    """Learn from what the actors put into the queue until it is solved, or the updates are over."""
    async with rpc.init("learner", role="learner", init_method=meet):
        samples: rpc.Queue[Fragment] = rpc.Queue("samples", maxsize=2 * settings.actors, timeout=settings.timeout)
        with actors, Steps("updates", settings.updates, show=settings.show) as progress:
            await asyncio.to_thread(actors.look)  # the first one takes seconds, as the fork server imports torch
            async with asyncio.TaskGroup() as tasks:  # who dies of itself ends the updates as well
                tending = tasks.create_task(tend(settings, actors, record))
                await update(settings, samples, record, progress)
                tending.cancel()
            await samples.shutdown(immediate=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_TIMEOUT):
                    while actors.running:
                        await asyncio.sleep(launcher.LOOK)
                        actors.look()


async def learn_from_others(settings: Settings, record: Record) -> None:
    """The same, with actors that a launcher has started, and starts again."""
    async with rpc.init("learner", role="learner") as worker:
        samples: rpc.Queue[Fragment] = rpc.Queue("samples", maxsize=2 * settings.actors, timeout=settings.timeout)
        with Steps("updates", settings.updates, show=settings.show) as progress:
            counting = asyncio.create_task(count_replaced(worker, record))
            try:
                await update(settings, samples, record, progress)
            except rpc.errors.WorkerClosed:  # SIGTERM: a drain would wait for samples that no one takes any more
                await worker.shutdown(graceful=False)
                raise
            counting.cancel()
        await samples.shutdown(immediate=True)


async def count_replaced(worker: rpc.Worker, record: Record) -> None:
    """Note each actor whose name another process has taken."""
    async for event in worker.events():
        if isinstance(event, rpc.events.WorkerReplaced):
            record.kills.append(record.now())


async def update(settings: Settings, samples: rpc.Queue[Fragment], record: Record, progress: Steps) -> None:
    """Take samples, learn from them, publish what came of it; again and again."""
    learner, last = Learner(settings.seed), 0.0
    checkpoint = Path(settings.checkpoint) if settings.checkpoint else None
    if checkpoint and checkpoint.exists():
        record.before = learner.load(checkpoint)
        progress.done(f"goes on after update {record.before}", count=record.before)
    weights = await rpc.publish("policy", learner.policy.state_dict())
    while not record.rewards or not (record.solved or record.updates >= settings.updates):
        fragments: list[Fragment] = []
        while len(fragments) < settings.batch:
            try:
                fragments += await samples.get_many(settings.batch - len(fragments))
            except rpc.errors.ItemLost as error:  # an actor was killed before we had fetched what it has put
                record.lost_items += error.count
        await asyncio.to_thread(learner.learn, fragments)
        record.add(fragments, weights.version)
        if checkpoint:
            await asyncio.to_thread(learner.save, checkpoint, record.updates)
        weights = await rpc.publish("policy", learner.policy.state_dict())
        if record.solved or record.now() - last > TELL:
            last = record.now()
            progress.done(record.line(), count=record.updates)


async def tend(settings: Settings, actors: launcher.LocalWorkers, record: Record) -> None:
    """Watch the actors. With chaos, kill one every few seconds, and start another one of its name.

    Raises: WorkerFailed if one has ended without being killed.
    """
    numbers, due = random.Random(settings.seed), record.now() + settings.chaos
    while True:
        await asyncio.sleep(LOOK)
        actors.look()
        if actors.failed:
            raise actors.failure()
        if settings.chaos and record.now() > due:
            actors.replace(numbers.randrange(settings.actors))
            record.kills.append(record.now())
            due = record.now() + settings.chaos


def run(settings: Settings) -> dict[str, object] | None:
    """Train once and return the result as plain data (under a launcher: on rank 0, None elsewhere).

    Raises: WorkerFailed when an actor ended without being killed, or the run was not done in ``settings.timeout``
    seconds.
    """
    torch.set_num_threads(1)
    place = place_from_environment()
    if place is not None:
        return asyncio.run(take_part(place, replace(settings, actors=place.world_size - 1)))
    record = Record(settings)
    with tempfile.TemporaryDirectory(prefix="rpc-") as folder:

        async def whole() -> None:
            async with asyncio.timeout(settings.timeout):
                await learn(settings, meeting_in(folder), actors_of(settings, folder), record)

        try:
            asyncio.run(whole())
        except ExceptionGroup as failed:  # of the updates, and of who looked after the actors
            raise failed.exceptions[0] from None
        except TimeoutError:
            raise launcher.WorkerFailed(f"learner: not done after {settings.timeout:g} s", ["learner"]) from None
    return record.result()


async def take_part(place: Place, settings: Settings) -> dict[str, object] | None:
    """One process of a launcher: rank 0 learns, the others act."""
    if place.rank:
        await act(f"actor{place.rank - 1}", settings, 1000 * (settings.seed + place.rank))
        return None
    record = Record(settings)
    try:
        async with asyncio.timeout(settings.timeout):
            await learn_from_others(settings, record)
    except TimeoutError:
        raise launcher.WorkerFailed(f"learner: not done after {settings.timeout:g} s", ["learner"]) from None
    return record.result()


def lines(result: dict[str, Any]) -> list[str]:
    """What a run has to tell."""
    killed = len(result["kills"])
    how = f"solved in {result['solved_at']:.1f} s" if result["solved_at"] is not None else "not solved"
    since = f" after {result['before']}" if result["before"] else ""
    return [
        f"{result['actors']} actors: {how}, {len(result['rewards'])} updates{since}, {result['games_played']:,} games, "
        f"{result['total_steps']:,} steps, {result['total_steps'] / result['total_s']:,.0f} steps/s; "
        f"reward {result['rewards'][0]:.1f} -> {result['rewards'][-1]:.1f}; "
        f"weights {sum(result['ages']) / len(result['ages']):.1f} updates old on average"
        + (f"; {killed} actor{'s' * (killed != 1)} killed and replaced" if killed else "")
    ]


def command_line() -> CommandLine[Settings]:
    """The command line."""
    what = "CartPole learned from what many actors play, each at its own pace."
    made = CommandLine("actor_learner", what, Settings())
    made.option("actors", "processes that play", least=1)
    made.option("games", "that an actor plays side by side", least=1)
    made.option("steps", "of each game in an item of the queue", least=1)
    made.option("batch", "items of the queue for an update", least=1)
    made.option("updates", "at most so many", least=1)
    made.option("solved", "mean reward of the last hundred games at which the run ends")
    made.add_argument(
        "--chaos",
        type=float,
        nargs="?",
        const=KILL,
        default=0.0,
        metavar="SECONDS",
        help=f"kill an actor every so many seconds ({KILL:g}), and start another one in its place",
    )
    made.option("checkpoint", "write it after each update, and go on from it if it is there", metavar="FILE")
    made.common_options(picture="rewards, speed, and the age of the weights")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit code."""
    commands = command_line()

    def check(settings: Settings) -> None:
        if not 0 <= settings.chaos <= LONGEST:
            commands.error("--chaos takes a number of seconds above 0")
        place = place_from_environment()
        if place is not None and (settings.chaos or place.world_size < 2):
            commands.error("under a launcher it takes two processes or more, and no --chaos")

    return commands.main(argv, _announce_and_run, lines, draw_actor_learner, check)


def _announce_and_run(settings: Settings) -> dict[str, object] | None:
    chaos = f", one of them killed every {settings.chaos:g} s" if settings.chaos else ""
    if place_from_environment() is None:
        print(
            f"CartPole-v1: a learner and {settings.actors} actors with {settings.games} games each{chaos}", flush=True
        )
    return run(settings)


if __name__ == "__main__":
    # By its real name, not __main__: classes and functions travel to the other workers by name.
    from aiorpc.examples import actor_learner

    sys.exit(actor_learner.main())
