"""The arithmetic of the examples, without RPC."""

from __future__ import annotations

import pytest
import torch

from aiorpc.examples._shared import resnet
from aiorpc.examples._shared.policy import GAMMA, CartPole, Learner, discounted
from aiorpc.examples._shared.rl import AgentBase


def test_returns_count_later_rewards_less() -> None:
    """Each step's return is its reward and GAMMA times the next step's return."""
    assert discounted([]) == []
    assert discounted([1.0, 2.0, 3.0]) == pytest.approx([1 + GAMMA * (2 + GAMMA * 3), 2 + GAMMA * 3, 3])


def test_an_episode_has_exactly_its_steps() -> None:
    """Games that end are followed by others, so that all observers stay in step."""
    game = CartPole(seed=1)
    game.start()
    for _ in range(100):  # always pushing one way ends a game in about ten steps
        game.step(1)
    episode = game.finish()
    assert episode.returns.shape == (100,)
    assert 5 < episode.reward < 20
    game.start()
    game.step(0)
    assert game.finish().returns.tolist() == [1.0]


def test_the_learner_prefers_what_was_rewarded() -> None:
    """After learning from actions of which only one kind is rewarded, it is chosen more often."""
    learner = Learner(seed=3)
    states = torch.ones(64, 4)
    for _ in range(20):
        actions, log_probabilities = learner.choose(states)
        learner.learn(log_probabilities.unsqueeze(0), torch.tensor([actions], dtype=torch.float32), 1.0)
    learner.policy.eval()
    assert learner.policy(states[:1])[0, 1] > 0.9


def test_a_batch_is_complete_when_all_observers_have_asked() -> None:
    """The first callers get a Future that the last one completes; rows are in the observers' order."""
    agent = AgentBase(observers=3, seed=0)
    first = agent.select_action_batch(2, torch.full((4,), 2.0))
    assert agent.select_action_batch(0, torch.zeros(4)) is first and not first.done()
    agent.select_action_batch(1, torch.ones(4))
    assert first.done() and len(first.value()) == 3
    assert agent.select_action_batch(0, torch.zeros(4)) is not first


@pytest.mark.parametrize(("name", "count"), [("resnet18", 11_689_512), ("resnet50", 25_557_032)])
def test_the_networks_are_the_published_ones(name: str, count: int) -> None:
    """As many parameters for ImageNet's 1,000 classes as the networks of the paper."""
    assert resnet.parameter_count(list(resnet.resnet(name, 1000).parameters())) == count
