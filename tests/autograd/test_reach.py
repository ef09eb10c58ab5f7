"""Which leaves and received tensors the nodes of a graph lead to."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from aiorpc.runtime.gradients.contexts import MOST_BEHIND, AutogradContext
from aiorpc.runtime.gradients.reach import Leaf, Reach, ReceivedTensor, SentName, bits_of

Tensor = torch.Tensor


def leaf() -> Tensor:
    """Something that requires gradients."""
    return torch.ones(2, requires_grad=True)


def reached(reach: Reach, tensor: Tensor) -> list[Any]:
    """What a tensor's node leads to; of leaves, the tensors."""
    found = reach.targets_of(bits_of(reach.of(get_gradient_edge(tensor).node)))
    return [each.tensor if isinstance(each, Leaf) else each for each in found]


def same(found: list[Any], *wanted: Any) -> bool:
    """Whether these are the same objects, in any order."""
    return {id(each) for each in found} == {id(each) for each in wanted} and len(found) == len(wanted)


def test_leaves() -> None:
    """A node leads to the leaves it was computed from, each once, and to no others."""
    reach, (x, y, z) = Reach({}), (leaf(), leaf(), leaf())
    product = x * y
    total = product + x * 2
    assert same(reached(reach, total), x, y)
    assert same(reached(reach, product), x, y)
    assert same(reached(reach, x * torch.ones(2)), x)
    assert same(reached(reach, z), z)  # a leaf leads to itself
    assert len(reach.targets) == 3


def test_a_leaf_of_another_type_has_another_node() -> None:
    """What a program does to a leaf does not change the edges that a graph has of it; its next graph has others."""
    reach, (x, y) = Reach({}), (leaf(), leaf())
    edge, product = get_gradient_edge(x), x * y
    x.data = x.data.double()
    y.requires_grad_(False)
    assert same(reached(reach, product), x, y)
    assert same(reached(reach, x * 2), x)
    of_x = [target for target in reach.targets if isinstance(target, Leaf) and target.tensor is x]
    nodes = [target.edge.node for target in of_x]
    assert nodes == [edge.node, get_gradient_edge(x).node] and len(set(nodes)) == 2


def test_detached_parts_are_not_reached() -> None:
    """`detach` and `no_grad` end a graph."""
    reach, (x, y) = Reach({}), (leaf(), leaf())
    with torch.no_grad():
        constant = y * 3
    assert same(reached(reach, x * y.detach() + constant), x)


def test_nodes_with_several_outputs() -> None:
    """Each output leads to whatever the node leads to."""
    reach, (x, y) = Reach({}), (leaf(), leaf())
    first, second = torch.cat([x, y]).split(2)
    assert same(reached(reach, first), x, y) and same(reached(reach, second), x, y)


class Somebody:
    """Another worker, which a tensor is sent to."""

    record = None


def test_received_tensors_are_targets() -> None:
    """They end the graph, as leaves do; those that come later too."""
    context = AutogradContext(7, torch.empty(0, requires_grad=True))
    reach, x = Reach(context.received), leaf()
    tracked = context.receive(3, SentName(11, 1), [2, 5, 0], torch.ones(2))
    assert tracked.requires_grad
    (found,) = reached(reach, tracked * 2)
    assert isinstance(found, ReceivedTensor) and (found.sender, found.name) == (3, SentName(11, 1))
    assert found.behind == frozenset({(2, 5, 0)})
    later = context.receive(4, SentName(12, 0), None, torch.ones(2))
    targets = reached(reach, later * tracked + x)
    assert len(targets) == 3 and any(target is x for target in targets)
    mask = reach.of(get_gradient_edge(later * tracked + x).node)
    assert {each.sender for each in reach.received_of(mask)} == {3, 4}


def test_what_is_behind_a_tensor() -> None:
    """All that was sent on the way to it, by whomever; None when one of them does not say, or when it is too much."""
    context = AutogradContext(7, torch.empty(0, requires_grad=True))
    here, there, further = (
        context.receive(sender, SentName(11, 0), behind, torch.ones(2))
        for sender, behind in ((1, []), (2, [1, 4, 0, 3, 6, 1]), (3, None))
    )
    edge = get_gradient_edge
    assert context.behind(edge(leaf() * 2)) == set()
    assert context.behind(edge(here * 2)) == {(1, 11, 0)}
    names = {(1, 11, 0), (2, 11, 0), (1, 4, 0), (3, 6, 1)}
    assert context.behind(edge(here * there)) == names
    assert context.behind(edge(here * further)) is None
    many = context.receive(4, SentName(11, 0), [1, 2, 3] * 500, torch.ones(2))
    assert context.behind(edge(many * 2)) == {(4, 11, 0), (1, 2, 3)}
    crowd = [context.receive(5, SentName(n, 0), [], torch.ones(2)) for n in range(3000)]
    assert context.behind(edge(torch.stack(crowd).sum(0))) is None


def test_a_long_chain_does_not_say_all_that_is_behind_it() -> None:
    """A tensor that goes to and fro: what a message says of it is bounded, though one tensor only is behind it here."""
    here, there = (AutogradContext(7, torch.empty(0, requires_grad=True)) for _ in range(2))
    tensor, said = leaf() * 2, list[Any]()
    for _ in range(1000):
        for sender, (sends, receives) in enumerate(((here, there), (there, here))):
            sent = sends.send([tensor], (), Somebody())
            assert sent is not None
            behind = sent.behind[0]
            said.append(behind)
            tensor = receives.receive(sender, SentName(sent.number, sent.places[0]), behind, tensor.detach()) * 2
    first, second = said[0], said[1]
    assert first == [] and second is not None and second[0::2] == [0, 0] and len(second) == 3
    assert max(len(behind) for behind in said if behind is not None) // 3 <= MOST_BEHIND
    assert said[-1] is None


def test_deep_graphs() -> None:
    """Far deeper than Python may recurse."""
    reach, x = Reach({}), leaf()
    y = x
    for _ in range(20 * sys.getrecursionlimit()):
        y = y + 1
    assert same(reached(reach, y), x)


def test_wide_graphs() -> None:
    """A graph with more paths than could ever be walked, and more targets than bits of a machine word."""
    reach = Reach({})
    leaves = [leaf() for _ in range(200)]
    y = torch.stack(leaves).sum(0)
    for _ in range(60):
        y = y * y  # twice as many paths each time
    assert same(reached(reach, y), *leaves)
