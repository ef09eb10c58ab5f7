"""What is learned in actor_learner, and from what: an actor-critic, PPO, and CartPole in bundles. No RPC here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import gymnasium
import torch
from torch import Tensor, nn

GAMMA = 0.99
#: Of generalised advantage estimation (Schulman and others, 2016).
LAMBDA = 0.95
LEARNING_RATE = 2.5e-3
#: Of proximal policy optimisation (Schulman and others, 2017): how far a probability may go from that of the actor.
CLIP = 0.2
EPOCHS = 6
MINIBATCH = 256
ENTROPY, VALUE = 0.005, 0.5
LONGEST_NORM = 0.5


class ActorCritic(nn.Module):
    """Of CartPole's four observations the scores of its two actions, and what is still to be gained."""

    def __init__(self) -> None:
        super().__init__()
        self.actions = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.value = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """states: (..., 4) float32. Returns log-probabilities (..., 2) and values (...)."""
        return torch.log_softmax(self.actions(states), dim=-1), self.value(states).squeeze(-1)


@dataclass
class Fragment:
    """Some steps of several games, side by side. Tensors are (steps, games) by default.

    states: (steps + 1, games, 4) float32; the last state has no action. actions: int64. chosen: the log-probabilities
    of the actions when they were chosen. rewards: float32. ended: bool, whether the step ended the game, lost or at its
    limit. version: of the weights. scores: the rewards of games that ended.
    """

    states: Tensor
    actions: Tensor
    chosen: Tensor
    rewards: Tensor
    ended: Tensor
    version: int
    scores: list[float] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Steps of all games together."""
        return self.actions.numel()


class Games:
    """Several games of CartPole-v1, played on and on; another game follows the end of a game."""

    def __init__(self, count: int, seed: int) -> None:
        self._games = [gymnasium.make("CartPole-v1", disable_env_checker=True) for _ in range(count)]
        self._states = torch.stack(
            [torch.from_numpy(game.reset(seed=seed + number)[0]) for number, game in enumerate(self._games)]
        )
        self._scores = [0.0] * count
        self._random = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def play(self, policy: ActorCritic, steps: int, version: int) -> Fragment:
        """Play some steps of each game by a policy, from the present states."""
        count = len(self._games)
        states = torch.empty(steps + 1, count, 4)
        actions = torch.empty(steps, count, dtype=torch.int64)
        chosen, rewards = torch.empty(steps, count), torch.ones(steps, count)
        ended = torch.zeros(steps, count, dtype=torch.bool)
        scores: list[float] = []
        states[0] = self._states
        for step in range(steps):
            logs = torch.log_softmax(policy.actions(states[step]), dim=-1)
            drawn = torch.multinomial(logs.exp(), 1, generator=self._random)
            actions[step], chosen[step] = drawn.squeeze(1), logs.gather(1, drawn).squeeze(1)
            following = states[step + 1].numpy()
            for number, (game, action) in enumerate(zip(self._games, actions[step].tolist(), strict=True)):
                state, reward, lost, over, _ = game.step(action)
                self._scores[number] += float(reward)
                if lost or over:
                    ended[step, number] = True
                    scores.append(self._scores[number])
                    self._scores[number] = 0.0
                    state, _ = game.reset()
                following[number] = state
        self._states = states[steps].clone()
        return Fragment(states, actions, chosen, rewards, ended, version, scores)


def advantages(values: Tensor, rewards: Tensor, ended: Tensor) -> Tensor:
    """How much better each step was than expected, (steps, games). values: (steps + 1, games)."""
    found = torch.empty_like(rewards)
    following = torch.zeros_like(rewards[0])
    for step in reversed(range(len(rewards))):
        goes_on = (~ended[step]).float()
        surprise = rewards[step] + GAMMA * values[step + 1] * goes_on - values[step]
        following = surprise + GAMMA * LAMBDA * goes_on * following
        found[step] = following
    return found


class Learner:
    """The policy, and how it learns from fragments that older versions of it have played."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.policy = ActorCritic()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=LEARNING_RATE)

    def save(self, path: Path, updates: int) -> None:
        """Leave all of it, with the number of updates, in a file."""
        draft = path.with_suffix(".new")
        torch.save((updates, self.policy.state_dict(), self.optimizer.state_dict()), draft)
        draft.rename(path)  # a killed process leaves the old file or the new one

    def load(self, path: Path) -> int:
        """Go on from such a file; the number of updates so far."""
        updates, policy, optimizer = torch.load(path)
        self.policy.load_state_dict(policy)
        self.optimizer.load_state_dict(optimizer)
        return int(updates)

    def learn(self, fragments: list[Fragment]) -> None:
        """Some epochs over these, in minibatches."""
        with torch.no_grad():
            gains, targets = [], []
            for each in fragments:
                values = self.policy.value(each.states).squeeze(-1)
                gain = advantages(values, each.rewards, each.ended)
                gains.append(gain.flatten())
                targets.append((gain + values[:-1]).flatten())
        states = torch.cat([each.states[:-1].reshape(-1, 4) for each in fragments])
        actions = torch.cat([each.actions.flatten() for each in fragments])
        before = torch.cat([each.chosen.flatten() for each in fragments])
        gain, target = torch.cat(gains), torch.cat(targets)
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(states)).split(MINIBATCH):
                self._step(states[rows], actions[rows], before[rows], gain[rows], target[rows])

    def _step(self, states: Tensor, actions: Tensor, before: Tensor, gain: Tensor, target: Tensor) -> None:
        logs, values = self.policy(states)
        ratio = (logs.gather(1, actions.unsqueeze(1)).squeeze(1) - before).exp()
        better = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
        entropy = -(logs.exp() * logs).sum(dim=1).mean()
        loss = VALUE * nn.functional.smooth_l1_loss(values, target) - better - ENTROPY * entropy
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), LONGEST_NORM)
        self.optimizer.step()
