"""The arithmetic of the examples, without RPC."""

from __future__ import annotations

import itertools

import pytest
import torch

from aiorpc.examples._shared import resnet
from aiorpc.examples._shared.policy import GAMMA, CartPole, Learner, Policy, discounted
from aiorpc.examples._shared.progress import bar
from aiorpc.examples._shared.rl import AgentBase
from aiorpc.examples._shared.sweep import wins_from


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


def test_the_policy_gives_probabilities() -> None:
    """A row for each state, which sums to one."""
    rows = Policy()(torch.randn(5, 4))
    assert rows.shape == (5, 2)
    assert torch.allclose(rows.sum(dim=1), torch.ones(5))


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


def test_batches_win_from_where_they_always_do() -> None:
    """One lucky row before a loss does not count; a loss at the end means never."""
    rows = [{"observers": i + 1, "ratio": ratio} for i, ratio in enumerate((1.2, 0.9, 1.1, 1.5))]
    assert wins_from(rows) == 3
    assert wins_from([*rows, {"observers": 5, "ratio": 0.8}]) is None


def test_a_bar_is_as_long_as_its_share() -> None:
    """Always of the same width, in eighths of a character; what is beyond the ends is cut."""
    assert [bar(share, 4) for share in (-1.0, 0.0, 0.5, 1.0, 7.0)] == ["    ", "    ", "██  ", "████", "████"]
    assert bar(3 / 32, 4) == "▍   "


@pytest.mark.parametrize(("name", "count"), [("resnet18", 11_689_512), ("resnet50", 25_557_032)])
def test_the_networks_are_the_published_ones(name: str, count: int) -> None:
    """As many parameters for ImageNet's 1,000 classes as the networks of the paper."""
    assert resnet.parameter_count(list(resnet.resnet(name, 1000).parameters())) == count


def test_the_networks_take_small_images() -> None:
    """A score for each of the 30 classes, and a gradient for each parameter."""
    model = resnet.resnet("resnet18")
    scores = model(torch.randn(2, 3, 32, 32))
    assert scores.shape == (2, 30)
    assert all(g is not None for g in torch.autograd.grad(scores.sum(), list(model.parameters())))


def test_images_are_the_same_again_and_differ_by_reader() -> None:
    """A seed makes a stream of images; each reader has its own, with the same patterns."""
    first, again, other = (list(itertools.islice(resnet.images(5, r, 4, 16), 2)) for r in (1, 1, 2))
    assert first[0][0].shape == (4, 3, 16, 16)
    for (a, labels), (b, same) in zip(first, again, strict=True):
        assert torch.equal(a, b) and torch.equal(labels, same)
    assert not torch.equal(first[0][0], other[0][0])
    assert not torch.equal(first[0][0], first[1][0])
