"""The program of batch_rl: an agent, its observers and their training loop, on any module like torch.distributed.rpc.

The agent learns; observers play. Every step of every observer asks the agent for an action, so the agent answers one
small call per observer and step. Unbatched, each call runs the policy on one state. Batched, a call leaves its state
and takes a Future; the call that completes the set runs the policy once for all and completes the Future for all.

Which RPC is used is a parameter: a *backend* is a module with two names, ``rpc`` (any module with the names of
torch.distributed.rpc) and ``Agent`` (AgentBase with ``select_action_batch`` decorated by that module).
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from .launch import Place
from .policy import LONGEST_GAME, CartPole, Episode, Learner
from .progress import Steps, bar


@dataclass(frozen=True)
class Settings:
    """What can be chosen for a run. seed: of all generators, in all processes. show: print progress."""

    world_size: int = 6
    num_episode: int = 20
    num_steps: int = 500
    batch: bool = True
    seed: int = 543
    use_async: bool = False
    show: bool = True
    timeout: float = 1800.0
    backend_module: str = "aiorpc.examples.batch_rl"


def worker_name(rank: int) -> str:
    return "agent" if rank == 0 else f"observer{rank}"


class AgentCore:
    """Owns the policy, chooses actions with it, and remembers what learning needs. Knows nothing of calls.

    observers: how many there are.
    """

    def __init__(self, observers: int, seed: int) -> None:
        self.learner: Learner = Learner(seed)
        self.observers = observers
        # Log-probabilities: a list for each observer when they ask alone, a row for each step when they ask together.
        self._alone: list[list[Tensor]] = [[] for _ in range(observers)]
        self._together: list[Tensor] = []

    def act(self, observer: int, state: Tensor) -> int:
        """The action for one observer's state (4,). Any thread: an observer has one call at a time."""
        actions, log_probabilities = self.learner.choose(state.unsqueeze(0))
        self._alone[observer].append(log_probabilities)
        return actions[0]

    def act_together(self, states: dict[int, Tensor]) -> list[int]:
        """The actions of all observers, from one run of the policy."""
        # Rows in the observers' order, not in order of arrival: a seed gives the same run again.
        actions, log_probabilities = self.learner.choose(torch.stack([states[i] for i in range(self.observers)]))
        self._together.append(log_probabilities)
        return actions

    def learn(self, episodes: Sequence[Episode]) -> float:
        """Learn from what all observers saw, in their order; returns the mean reward."""
        if self._together:
            log_probabilities = torch.stack(self._together, dim=1)
        else:
            log_probabilities = torch.stack([torch.cat(row) for row in self._alone])
        reward = sum(episode.reward for episode in episodes) / len(episodes)
        self.learner.learn(log_probabilities, torch.stack([episode.returns for episode in episodes]), reward)
        self._together.clear()
        self._alone = [[] for _ in range(self.observers)]
        return reward


class AgentBase(AgentCore):
    """The agent as others call it; its methods run in several threads at once."""

    def __init__(self, observers: int, seed: int) -> None:
        super().__init__(observers, seed)
        self._lock = threading.Lock()
        self._states: dict[int, Tensor] = {}
        self._actions: Future[list[int]] = Future()

    def select_action(self, observer: int, state: Tensor) -> int:
        """The action for one observer's state (4,)."""
        return self.act(observer, state)

    def select_action_batch(self, observer: int, state: Tensor) -> Future[list[int]]:
        """The actions of all observers, as soon as all have brought their states."""
        with self._lock:
            future = self._actions
            self._states[observer] = state
            if len(self._states) < self.observers:
                return future
            states, self._states = self._states, {}
            self._actions = Future()
        future.set_result(self.act_together(states))
        return future


class Observer:
    """Plays CartPole; every action comes from the agent. Lives on an observer's worker."""

    def __init__(self, index: int, batch: bool, seed: int) -> None:
        torch.manual_seed(seed)
        self._index = index
        self._batch = batch
        self._game = CartPole(seed)

    def run_episode(self, agent: Any, num_steps: int) -> Episode:
        """Play ``num_steps`` steps. agent: RRef of the agent."""
        self._game.start()
        proxy = agent.rpc_sync()
        for _ in range(num_steps):
            if self._batch:
                action = proxy.select_action_batch(self._index, self._game.state)[self._index]
            else:
                action = proxy.select_action(self._index, self._game.state)
            self._game.step(action)
        return self._game.finish()


@dataclass
class Record:
    """What happened, episode by episode, as the result of a run."""

    settings: Settings
    observers: int
    rewards: list[float] = field(default_factory=list)
    running_rewards: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def _steps(self) -> int:
        return self.observers * self.settings.num_steps

    def add(self, reward: float, running_reward: float, seconds: float) -> str:
        """Note an episode; returns the line that tells of it."""
        self.rewards.append(reward)
        self.running_rewards.append(running_reward)
        self.seconds.append(seconds)
        # Each step is worth 1, so this is the share of the best possible game.
        share = bar(reward / min(self.settings.num_steps, LONGEST_GAME))
        return (
            f"episode {len(self.rewards):3d}   reward {reward:6.1f} {share}   running reward {running_reward:6.1f}   "
            f"{self._steps / seconds:8,.0f} steps/s"
        )

    def result(self) -> dict[str, Any]:
        """Plain data for JSON. steps_per_s: over the run. median_steps_per_s: of an episode, the first one left out."""
        later = self.seconds[1:] or self.seconds
        return {
            "program": "batch_rl",
            **asdict(self.settings),
            "world_size": self.observers + 1,
            "observers": self.observers,
            "steps": self._steps * len(self.seconds),
            "total_s": sum(self.seconds),
            "steps_per_s": self._steps * len(self.seconds) / sum(self.seconds),
            "median_steps_per_s": self._steps / median(later),
            "rewards": self.rewards,
            "running_rewards": self.running_rewards,
            "seconds": self.seconds,
        }


def train(rpc: Any, agent: AgentBase, observers: Sequence[Any], record: Record) -> None:
    """The training loop, on the agent's worker. observers: RRefs."""
    settings = record.settings
    agent_ref = rpc.RRef(agent)
    with Steps("episodes", settings.num_episode, show=settings.show) as progress:
        for _ in range(settings.num_episode):
            started = time.perf_counter()
            futures = [each.rpc_async(timeout=0).run_episode(agent_ref, settings.num_steps) for each in observers]
            reward = agent.learn(torch.futures.wait_all(futures))
            progress.done(record.add(reward, agent.learner.running_reward, time.perf_counter() - started))


def run_agent(backend: Any, place: Place, settings: Settings) -> dict[str, Any]:
    """Make the observers, train, and return the result."""
    rpc, count = backend.rpc, place.world_size - 1
    agent = backend.Agent(count, settings.seed)
    observers = [
        rpc.remote(worker_name(rank), Observer, args=(rank - 1, settings.batch, settings.seed + rank))
        for rank in range(1, place.world_size)
    ]
    record = Record(settings, count)
    train(rpc, agent, observers, record)
    return record.result()


def blocking_role(place: Place, settings: Settings) -> dict[str, object] | None:
    """One process of the run: rank 0 is the agent, the others serve until it is done."""
    backend = importlib.import_module(settings.backend_module)
    backend.rpc.init_rpc(worker_name(place.rank), rank=place.rank, world_size=place.world_size)
    result = run_agent(backend, place, settings) if place.rank == 0 else None
    backend.rpc.shutdown()
    return result
