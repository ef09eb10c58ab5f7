"""What is learned in batch_rl, and from what: a policy, its optimizer, and CartPole. No RPC here."""

from __future__ import annotations

from dataclasses import dataclass

import gymnasium
import torch
from torch import Tensor, nn

GAMMA = 0.99
LEARNING_RATE = 1e-2
#: Weight of the latest episode in the running reward.
LATEST = 0.05
#: Steps after which CartPole-v1 ends a game that was not lost.
LONGEST_GAME = 500


class Policy(nn.Module):
    """Probabilities of CartPole's two actions from its four observations."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: nn.Linear = nn.Linear(4, 128)
        self.dropout: nn.Dropout = nn.Dropout(p=0.6)
        self.actions: nn.Linear = nn.Linear(128, 2)

    def forward(self, states: Tensor) -> Tensor:
        """states: (N, 4) float32. Returns (N, 2), each row summing to 1."""
        scores: Tensor = self.actions(torch.relu(self.dropout(self.hidden(states))))
        return torch.softmax(scores, dim=1)


class Learner:
    """A policy and how it learns: REINFORCE with Adam."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.policy: Policy = Policy()
        self.optimizer: torch.optim.Adam = torch.optim.Adam(self.policy.parameters(), lr=LEARNING_RATE)
        self.running_reward: float = 10.0

    def choose(self, states: Tensor) -> tuple[list[int], Tensor]:
        """Draw an action for each row of ``states`` (N, 4); returns them and their log-probabilities (N,)."""
        probabilities = self.policy(states)
        actions = torch.multinomial(probabilities.detach(), 1)
        return actions.flatten().tolist(), probabilities.gather(1, actions).flatten().log()

    def learn(self, log_probabilities: Tensor, returns: Tensor, reward: float) -> None:
        """One optimizer step. Both tensors: (observers, steps). reward: of this episode, for the running reward."""
        scaled = (returns - returns.mean()) / (returns.std() + torch.finfo(torch.float32).eps)
        loss = -(log_probabilities * scaled).sum() / len(returns)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.running_reward = LATEST * reward + (1 - LATEST) * self.running_reward


@dataclass
class Episode:
    """What one observer saw. returns: (steps,) discounted rewards. reward: mean reward of its games."""

    returns: Tensor
    reward: float


class CartPole:
    """CartPole-v1 played on and on; the next game follows the end of a game.

    Playing a fixed number of steps keeps all observers in step: each batch of states is full.
    """

    def __init__(self, seed: int) -> None:
        self._game = gymnasium.make("CartPole-v1")
        self._seed: int | None = seed
        self.state = torch.zeros(4)
        self._rewards: list[list[float]] = []

    def start(self) -> None:
        """Begin an episode with a fresh game."""
        self._rewards = [[]]
        self._reset()

    def _reset(self) -> None:
        # Seeded once: later games go on with the same generator, and differ.
        state, _ = self._game.reset(seed=self._seed)
        self._seed = None
        self.state = torch.from_numpy(state)

    def step(self, action: int) -> None:
        """Take one action; afterwards ``state`` is the new observation (4,)."""
        state, reward, terminated, truncated, _ = self._game.step(action)
        self._rewards[-1].append(float(reward))
        if terminated or truncated:
            self._rewards.append([])
            self._reset()
        else:
            self.state = torch.from_numpy(state)

    def finish(self) -> Episode:
        """The episode's returns, and the mean reward of its games (the last one may have been cut short)."""
        games = [game for game in self._rewards if game]
        reward = sum(map(sum, games)) / len(games)
        return Episode(torch.tensor([value for game in games for value in discounted(game)]), reward)


def discounted(rewards: list[float]) -> list[float]:
    """For each step of one game, the sum of the rewards from there on, each later one worth GAMMA times less."""
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + GAMMA * following
        returns.append(following)
    return returns[::-1]
