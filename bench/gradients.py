"""Gradients across two workers, against torch.distributed.autograd: training steps, large layers, chains, memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from . import gradient_clients
from .memory import ENDS
from .sides import SIDES
from .stage import Figures, Stage, column
from .stats import Better, Row

#: The model whose steps are counted: width of both layers, and rows of a batch.
WIDTH, BATCH = 256, 32
STEP_TARGET = 2.0
WARM_UP = 50  # steps; torch compiles its optimizers during the first ones

#: The layers of https://docs.pytorch.org/tutorials/recipes/cuda_rpc.html.
SHARD_WIDTH, SHARD_BATCH = 1000, 1000
MOST_TIMES = 1.2

CHAINS = (1, 5, 25)

MOST_GROWTH = 4.0  # MB
MEMORY_WARM_UP = 200  # steps, until allocators and pools have what they need


def step(stage: Stage) -> list[Row]:
    """Forward, backward and optimizer of a small model. New processes for each round, as for all that is short."""
    model = {"width": WIDTH, "batch": BATCH, "warm_up": WARM_UP}
    results = _anew(stage, gradient_clients.steps, **model, seconds=stage.plan.seconds, least=stage.plan.transfers)
    note = f"2 layers of {WIDTH}, batch {BATCH}, blocking"
    return [
        _row("autograd_step", "steps/s", "1/s", results, "step", note, target=STEP_TARGET),
        _row("autograd_step", "steps/s, backward and step in one verb of aiorpc's", "1/s", results, "at once", note),
        _row("autograd_step", "forward and backward alone", "1/s", results, "pass", note),
    ]


def shards(stage: Stage) -> list[Row]:
    """Two large layers: how much a pass takes beyond its computation and its copies.

    Both are measured in turn with it, in the same process. The copies are two round trips with another tensor of that
    size each way, by the same library outside of contexts. New processes for each round: how fast one computes depends
    on where its memory happens to lie, for as long as it lives.
    """
    layers = {"size": SHARD_WIDTH, "batch": SHARD_BATCH}
    results = _anew(stage, gradient_clients.shards, **layers, seconds=stage.plan.seconds, least=stage.plan.transfers)
    note = f"2 layers of {SHARD_WIDTH}, batch {SHARD_BATCH}"
    return [
        _row("autograd_shards", "forward and backward", "ms", results, "pass", note),
        _row("autograd_shards", "the same in one process", "ms", results, "compute", note),
        _row("autograd_shards", "copies alone, two each way", "ms", results, "copies", note),
        _row(
            "autograd_shards", "that by one process and copies together", "x", results, "times", note, limit=MOST_TIMES
        ),
    ]


def chain(stage: Stage) -> list[Row]:
    """A small tensor that goes to and fro, and its gradient the same way back: what each round trip costs."""
    results = _anew(
        stage, gradient_clients.chains, lengths=CHAINS, seconds=stage.plan.seconds, least=stage.plan.transfers
    )
    note = "2x2 tensor, forward and backward"
    lengths = [
        _row("autograd_chain", f"{length} round trip{'s' if length > 1 else ''}", "µs", results, str(length), note)
        for length in CHAINS
    ]
    return [*lengths, _row("autograd_chain", "one more round trip", "µs", results, "slope", note)]


def memory(stage: Stage) -> list[Row]:
    """Many steps of the small model: neither end may grow, and no context may be left."""
    steps = stage.plan.iterations
    model = {"width": WIDTH, "batch": BATCH, "warm_up": MEMORY_WARM_UP}
    results = _anew(stage, gradient_clients.growth, **model, iterations=steps)
    note = f"{steps:,} steps"
    grown = [_row("autograd_memory", f"growth, {end}", "MB", results, end, note, limit=MOST_GROWTH) for end in ENDS]
    left = [
        _row("autograd_memory", f"contexts left, {end}", "", results, f"contexts, {end}", note, limit=0.0)
        for end in ENDS
    ]
    return grown + left


def _anew(stage: Stage, function: Callable[..., Any], **kwargs: Any) -> dict[str, list[Figures]]:
    return stage.alternate_anew({side: partial(stage.new_client, side, function, **kwargs) for side in SIDES})


def _row(
    name: str,
    quantity: str,
    unit: str,
    results: dict[str, list[Figures]],
    figure: str,
    note: str,
    *,
    target: float | None = None,
    limit: float | None = None,
) -> Row:
    ours, theirs = (column(results[side], figure) for side in SIDES)
    better: Better = "higher" if unit == "1/s" else "lower"
    return Row(name, quantity, unit, better, ours, theirs, target, note, limit=limit)
