"""How many messages one step of a model sends, in both directions together: what neither machine nor noise changes.

A message is what one worker says to the other at once (`Statistics.messages_sent`). A figure is the difference between
a batch of operations and one of none, by the number of operations, and of three such pairs the median. What each of
them is, ``--only functions --list training`` says: an observer of both workers sees them pass, in a run of its own.
"""

from __future__ import annotations

from . import counting
from .cohort import Cohort
from .counting import BATCHES, Operation
from .memory import ENDS
from .message_clients import ALL, count_messages
from .sides import CLIENT
from .stage import Plan, Stage
from .stats import Row

#: The operations whose messages are counted: those that need gradients, where a step is more than one call.
STEPS = ("chain", "training", "two_layers", "at_once")
Batches = dict[str, list[dict[str, float]]]


def counted(stage: Stage) -> list[Row]:
    """Messages of a round trip in a graph, and of training steps."""
    if stage.null:
        return []
    with counting.pair(stage, "blocking", counted=False) as cohort:
        return [_row(operation, count(cohort, operation, stage.plan)) for operation in map(counting.choose, STEPS)]


def count(cohort: Cohort, operation: Operation, plan: Plan, *, watched: bool = False) -> Batches:
    """By end, what it sent for one operation in each batch, under `ALL` the number; BATCHES in each of the rounds."""
    turns = operation.turns(plan)
    share = {"make": operation.make, "times": turns, "batches": plan.rounds * BATCHES, "watched": watched}
    counts = cohort.run(CLIENT, count_messages, **share)
    return {end: counting.differences(counts[end], turns * operation.calls) for end in ENDS}


def _row(operation: Operation, found: Batches) -> Row:
    totals = counting.in_rounds([sum(batch[ALL] for batch in both) for both in zip(*found.values(), strict=True)])
    return Row("functions", f"{operation.quantity}: messages", "messages", "lower", tuple(totals), note=operation.note)


def listing(operation: Operation, plan: Plan) -> str:
    """The messages that one operation sends, most frequent first, with the worker that sends them."""
    with Stage(plan) as stage, counting.pair(stage, "blocking", counted=False) as cohort:
        found = count(cohort, operation, plan, watched=True)
    medians = {end: counting.medians(batches) for end, batches in found.items()}
    total = sum(each.pop(ALL) for each in medians.values())
    lines = [(number, end, name) for end, names in medians.items() for name, number in names.items()]
    shown = sorted((line for line in lines if line[0] >= counting.LEAST_SHOWN), key=lambda line: (-line[0], *line[1:]))
    title = f"{operation.quantity} ({operation.note or operation.style}): {total:,.2f} messages"
    return "\n".join(
        [f"{'number':>7} {'sent by':>7}  {title}", *(f"{n:7.2f} {end:>7}  {name}" for n, end, name in shown)]
    )
