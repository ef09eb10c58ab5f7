"""The program of batch_rl once more, with ``async def``: the same training loop, without threads and locks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import torch

import aiorpc as rpc

from .launch import Place
from .policy import CartPole, Episode
from .progress import Steps
from .rl import AgentCore, Record, Settings, worker_name


class AsyncAgent(AgentCore):
    """The agent as others call it. Its methods run on the worker's loop, one at a time: nothing to lock."""

    def __init__(self, observers: int, seed: int) -> None:
        super().__init__(observers, seed)
        self._states: dict[int, torch.Tensor] = {}
        self._actions: asyncio.Future[list[int]] | None = None

    async def select_action(self, observer: int, state: torch.Tensor) -> int:
        """The action for one observer's state (4,)."""
        return self.act(observer, state)

    async def select_action_batch(self, observer: int, state: torch.Tensor) -> list[int]:
        """The actions of all observers, as soon as all have brought their states."""
        future = self._actions = self._actions or asyncio.get_running_loop().create_future()
        self._states[observer] = state
        if len(self._states) == self.observers:
            states, self._states, self._actions = self._states, {}, None
            future.set_result(self.act_together(states))
        # One future for many waiters: a cancelled waiter must not cancel it for the others.
        return await asyncio.shield(future)


class AsyncObserver:
    """Plays CartPole; every action comes from the agent. A step of the game is short enough for the loop."""

    def __init__(self, index: int, batch: bool, seed: int) -> None:
        torch.manual_seed(seed)
        self._index = index
        self._batch = batch
        self._game = CartPole(seed)

    async def run_episode(self, agent: rpc.RRef[AsyncAgent], num_steps: int) -> Episode:
        """Play ``num_steps`` steps."""
        self._game.start()
        proxy = agent.rpc_async()
        for _ in range(num_steps):
            if self._batch:
                action = (await proxy.select_action_batch(self._index, self._game.state))[self._index]
            else:
                action = await proxy.select_action(self._index, self._game.state)
            self._game.step(action)
        return self._game.finish()


async def train(agent: AsyncAgent, observers: Sequence[rpc.RRef[AsyncObserver]], record: Record) -> None:
    """The training loop, on the agent's worker."""
    settings = record.settings
    agent_ref = rpc.RRef(agent)
    with Steps("episodes", settings.num_episode, show=settings.show) as progress:
        for _ in range(settings.num_episode):
            started = time.perf_counter()
            games = [each.rpc_async(timeout=0).run_episode(agent_ref, settings.num_steps) for each in observers]
            reward = agent.learn(await asyncio.gather(*games))
            progress.done(record.add(reward, agent.learner.running_reward, time.perf_counter() - started))


async def run_agent(place: Place, settings: Settings) -> dict[str, object]:
    """Make the observers, train, and return the result."""
    agent = AsyncAgent(place.world_size - 1, settings.seed)
    observers = [
        rpc.remote(worker_name(rank), AsyncObserver, rank - 1, settings.batch, settings.seed + rank)
        for rank in range(1, place.world_size)
    ]
    record = Record(settings, agent.observers)
    await train(agent, observers, record)
    return record.result()


async def _main(place: Place, settings: Settings) -> dict[str, object] | None:
    async with rpc.init(worker_name(place.rank), rank=place.rank, world_size=place.world_size):
        # Observers have nothing to start: leaving serves until the agent is done.
        return await run_agent(place, settings) if place.rank == 0 else None


def async_role(place: Place, settings: Settings) -> dict[str, object] | None:
    """One process of the run: rank 0 is the agent, the others serve until it is done."""
    return asyncio.run(_main(place, settings))
