"""How many Python functions one operation runs, in both processes together: what does not depend on the machine.

Counted is every Python function that is entered in any thread of caller and callee, and every coroutine or generator
that is resumed, as ``sys.setprofile`` reports it ("call" events); functions written in C are not. So are the handler
itself, the caller's own coroutine, and what torch runs in Python of the operation. A figure is the difference between
a batch of operations and one of none, by the number of operations, and of three such pairs the median. The loops are
uvloop's. Two options differ from the default: ``busy_wait=0``, as a thread that stays awake runs functions for as long
as it waits, and ``lag_warning=0``, whose thread would count by the second. What else goes by time is a few functions a
second. With many calls under way a few percent depend on how many messages the loops find at once, and with other
processes on the same cores a few depend on who comes first to read a call, the loop or the thread that ran the last.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import count_clients, functions
from .cohort import Cohort
from .memory import ENDS, pend
from .sides import CLIENT, PAIR, Style
from .stage import Figures, Plan, Stage, column
from .stats import BenchError, Row

OPTIONS = {"busy_wait": 0.0, "lag_warning": 0.0}
BATCHES = 3  # in a round
PENDING_CALLS = 1_000
LEAST_SHOWN = 0.02  # times an operation
#: Over TCP, and what then stands beside an operation: sessions are what lets a connection be mended.
TCP: dict[str, dict[str, Any]] = {
    "TCP": {"transports": ("tcp",)},
    "TCP, reconnect_grace=0": {"transports": ("tcp",), "reconnect_grace": 0.0},
}
OVER_TCP = ("awaited", "in_flight", "blocking", "tensor")  # of the operations


@dataclass(frozen=True)
class Operation:
    """What is counted. name: for ``--list``. make: runs in the client. calls: in each turn of what it gives.

    share: turns for each of the plan's operations; those that take long have fewer.
    """

    name: str
    quantity: str
    style: Style
    make: Callable[[], Any]
    note: str = ""
    calls: int = 1
    share: float = 1.0

    def turns(self, plan: Plan) -> int:
        """How often it is repeated in a batch."""
        return max(1, round(plan.operations * self.share))


OPERATIONS = (
    Operation("awaited", "awaited no-op", "awaited", count_clients.awaited, "async def handler"),
    Operation(
        "in_flight",
        f"a call of {count_clients.WINDOW} under way",
        "awaited",
        count_clients.in_flight,
        "async def handler",
        calls=count_clients.WINDOW,
        share=0.01,
    ),
    Operation("blocking", "blocking no-op", "blocking", count_clients.blocking),
    Operation("tensor", "2x2 tensor echoed", "blocking", count_clients.tensor, "blocking"),
    Operation("operator", "torch.add of two 2x2 tensors", "blocking", count_clients.operator, "blocking"),
    Operation(
        "chain",
        "a round trip in a graph",
        "blocking",
        count_clients.chain,
        f"2x2 tensor, {count_clients.CHAIN} of them, forward and backward",
        calls=count_clients.CHAIN,
        share=0.05,
    ),
    Operation(
        "training",
        "training step",
        "blocking",
        count_clients.training,
        "a remote layer of 16, DistributedOptimizer",
        share=0.1,
    ),
    Operation(
        "two_layers",
        "training step",
        "blocking",
        count_clients.two_layers,
        "two layers of 16, one of them remote, DistributedOptimizer",
        share=0.1,
    ),
    Operation(
        "at_once",
        "training step",
        "blocking",
        count_clients.two_layers_at_once,
        "the same two layers, backward and step in one verb",
        share=0.1,
    ),
)


def choose(name: str) -> Operation:
    """The operation of that name; ValueError names the known ones."""
    for operation in OPERATIONS:
        if operation.name == name:
            return operation
    raise ValueError(f"no operation {name}; there are {', '.join(each.name for each in OPERATIONS)}")


def counted(stage: Stage) -> list[Row]:
    """Functions of every operation, and memory blocks alive for each call that is under way."""
    if stage.null:
        return []
    found: dict[str, list[float]] = {}
    blocks: dict[str, list[Figures]] = {}
    for style in ("awaited", "blocking"):
        with pair(stage, style) as cohort:
            for operation in OPERATIONS:
                if operation.style == style:
                    found[operation.name] = totals(cohort, operation, stage.plan)
            if style == "blocking":
                blocks = stage.alternate({"calls": partial(blocks_alive, cohort)})
    rows = [_row(each.quantity, "functions", found[each.name], each.note) for each in OPERATIONS]
    rows += _over_tcp(stage)
    note = f"{PENDING_CALLS:,} calls, async def handler that awaits"
    return rows + [
        _row(f"blocks alive for a call under way, {end}", "blocks", column(blocks["calls"], end), note) for end in ENDS
    ]


def _over_tcp(stage: Stage) -> list[Row]:
    """The same of some operations, as between two hosts."""
    rows = []
    for note, options in TCP.items():
        for style in ("awaited", "blocking"):
            with pair(stage, style, options) as cohort:
                for operation in (each for each in map(choose, OVER_TCP) if each.style == style):
                    rows.append(_row(operation.quantity, "functions", totals(cohort, operation, stage.plan), note))
    return rows


def pair(stage: Stage, style: Style, options: Mapping[str, Any] | None = None, *, counted: bool = True) -> Cohort:
    """Two workers. options: beside those for all that is counted. counted: whether they count functions."""
    return stage.start("aiorpc", PAIR, style, {**OPTIONS, **(options or {})}, counted=counted)


def totals(cohort: Cohort, operation: Operation, plan: Plan) -> list[float]:
    """All functions that one operation runs in both processes; one figure for each round."""
    return in_rounds([_total(batch) for batch in count(cohort, operation, plan)])


def count(cohort: Cohort, operation: Operation, plan: Plan) -> list[dict[str, dict[str, float]]]:
    """By batch and end, how often each function ran for one operation; BATCHES in each of the plan's rounds."""
    measure = count_clients.count_awaited if operation.style == "awaited" else count_clients.count_blocking
    turns = operation.turns(plan)
    found = []
    for _ in range(plan.rounds):
        counts = cohort.run(CLIENT, measure, make=operation.make, times=turns, batches=BATCHES)
        ends = [differences(counts[end], turns * operation.calls) for end in ENDS]
        found += [dict(zip(ENDS, batch, strict=True)) for batch in zip(*ends, strict=True)]
    return found


def differences(batches: Sequence[Counter[str]], operations: int) -> list[dict[str, float]]:
    """Batches with operations, which are every second one, less those before them without, for each operation."""
    found = []
    for without, batch in zip(batches[::2], batches[1::2], strict=True):
        names = without.keys() | batch.keys()
        found.append({name: (batch[name] - without[name]) / operations for name in names})
    return found


def _total(batch: dict[str, dict[str, float]]) -> float:
    return sum(sum(functions.values()) for functions in batch.values())


def in_rounds(batches: Sequence[float]) -> list[float]:
    """The median of each round's batches."""
    rounds = [batches[place : place + BATCHES] for place in range(0, len(batches), BATCHES)]
    return [round(statistics.median(each), 2) for each in rounds]


def blocks_alive(cohort: Cohort) -> Figures:
    """Memory blocks of Python's allocator at both ends for each call that waits for its answer."""
    handler = f"{functions.__name__}:{functions.wait_for_release.__name__}"
    figures = cohort.run(CLIENT, pend, handler=handler, calls=PENDING_CALLS, gauge=functions.allocated_blocks)
    if figures["pending"]:
        raise BenchError("calls were left pending")
    return {end: figures[end] / PENDING_CALLS for end in ENDS}


def _row(quantity: str, unit: str, values: Sequence[float], note: str) -> Row:
    return Row("functions", quantity, unit, "lower", tuple(values), note=note)


def listing(operation: Operation, plan: Plan) -> str:
    """The functions that one operation runs, most frequent first: how often in both processes, and in each."""
    with Stage(plan) as stage, pair(stage, operation.style) as cohort:
        batches = count(cohort, operation, plan)
    ends = {end: medians([batch[end] for batch in batches]) for end in ENDS}
    both = {name: sum(found.get(name, 0.0) for found in ends.values()) for name in set().union(*ends.values())}
    order = sorted(both, key=lambda name: (-both[name], name))
    shown = [name for name in order if both[name] >= LEAST_SHOWN]
    total = statistics.median(_total(batch) for batch in batches)
    title = f"{operation.quantity} ({operation.note or operation.style}): {total:,.1f} functions"
    lines = [[*("both", *ENDS), title]]
    lines += [[*(f"{found.get(name, 0.0):.2f}" for found in (both, *ends.values())), name] for name in shown]
    return "\n".join(" ".join(f"{cell:>7}" for cell in line[:-1]) + f"  {line[-1]}" for line in lines)


def medians(batches: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each name, over all batches."""
    names: set[str] = set().union(*batches)
    return {name: statistics.median(batch.get(name, 0.0) for batch in batches) for name in names}
