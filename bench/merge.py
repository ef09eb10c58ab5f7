"""``python -m bench --merge a.json b.json c.json``: the table of docs/inside/figures.md out of several runs' results.

A figure is the median of the runs' medians, and so is a ratio; beside it stands the least and the greatest ratio of all
rounds of all runs. A row that no run has is left out, and what a run has beside these rows is in its own file. What a
whole run leaves out (``--only groups,publish,queue``) comes from runs of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from . import hardware, machine
from .stats import BenchError, Outcome, Row

HEADINGS = ("", "aiorpc", "torch.distributed.rpc", "ratio", "least to most")


@dataclass(frozen=True)
class Line:
    """One line of the table of figures: what it says, and which row of a run it is made of."""

    said: str
    measurement: str
    quantity: str
    note: str = ""
    size: int | None = None
    against: str = ""


WEIGHTS = ("publish", "until the last of 8 readers has it", "256 MB")
QUEUE = "Ray's Queue"
LINES = (
    Line("blocking call of a Python no-op (`def`), p50 in µs", "noop_blocking", "p50"),
    Line(
        "awaited call, `async def` handler, against torch's rpc_sync",
        "noop_awaited",
        "p50",
        "async def handler",
    ),
    Line("the same with a `def` handler, which needs a thread", "noop_options", "p50", "awaited, def handler"),
    Line(
        "the awaited call with `dedicated_loop=True`",
        "noop_options",
        "p50",
        "awaited, async def handler, dedicated_loop",
    ),
    Line("the awaited call with `busy_wait=0`", "noop_options", "p50", "awaited, async def handler, busy_wait=0"),
    Line("the blocking call with an `async def` handler", "noop_options", "p50", "blocking, async def handler"),
    Line("the blocking call with `busy_wait=0`", "noop_options", "p50", "blocking, def handler, busy_wait=0"),
    Line("calls/s with 512 under way, script", "inflight512", "calls/s", "script, rpc_async and wait"),
    Line("calls/s with 512 under way, coroutines", "inflight512", "calls/s", "512 coroutines, async def handler"),
    Line("2x2 tensor echoed, blocking", "tensor_2x2", "p50", "echo, blocking"),
    Line("2x2 tensor echoed, awaited", "tensor_2x2", "p50", "echo, awaited, async def handler"),
    Line("64 KB sent, tiny reply", "tensors", "send p50", "64 KB"),
    Line("64 KB echoed", "tensors", "echo p50", "64 KB"),
    Line("1 MB sent, tiny reply", "tensors", "send p50", "1 MB"),
    Line("1 MB echoed", "tensors", "echo p50", "1 MB"),
    Line("16 MB sent, tiny reply", "tensors", "send p50", "16 MB"),
    Line("16 MB echoed", "tensors", "echo p50", "16 MB"),
    Line("256 MB sent, tiny reply", "tensors", "send p50", "256 MB"),
    Line("256 MB echoed", "tensors", "echo p50", "256 MB"),
    Line("four times 64 MB at once, GB/s", "concurrent", "sent", "4 x 64 MB"),
    Line("state_dicts of ResNet-50 a second", "state_dict", "sent", "ResNet-50, 320 tensors, 102 MB"),
    Line("the very first 1 MB between two processes", "first_transfer", "send", "1 MB"),
    Line("the very first 256 MB", "first_transfer", "send", "256 MB"),
    Line("1 MB sent over TCP alone", "tcp_only", "send p50", "1 MB"),
    Line("256 MB sent over TCP alone", "tcp_only", "send p50", "256 MB"),
    Line("CartPole example, 5 observers, steps/s", "batch_rl", "steps/s", "5 observers, batched"),
    Line(
        "parameter server example, ResNet-50, images/s",
        "batch_ps",
        "images/s",
        "ResNet-50, 2 trainers, 2 images of 32x32 a step",
    ),
    Line(
        "an old program on `aiorpc.compat.torch`: small calls, most of them operators, steps/s",
        "dropin",
        "small calls, steps/s",
        "7 calls, 6 of them operators, which torch runs without Python",
    ),
    Line(
        "the same program: steps of episodes, with a call back each, 1/s",
        "dropin",
        "steps of episodes/s",
        "the server calls back at every step",
    ),
    Line(
        "the same program: training of a remote layer of 16, steps/s",
        "dropin",
        "training steps/s",
        "layer of 16, batch 8, DistributedOptimizer",
    ),
    Line(
        "training, two layers of 256 on two workers, steps/s",
        "autograd_step",
        "steps/s",
        "2 layers of 256, batch 32, blocking",
    ),
    Line(
        "the same by `backward_and_step`, against torch's two verbs",
        "autograd_step",
        "steps/s, backward and step in one verb of aiorpc's",
        "2 layers of 256, batch 32, blocking",
    ),
    Line(
        "forward and backward, two layers of 1000, batch 1000, ms",
        "autograd_shards",
        "forward and backward",
        "2 layers of 1000, batch 1000",
    ),
    Line(
        "for comparison: the same computation there in one process, without RPC",
        "autograd_shards",
        "the same in one process",
        "2 layers of 1000, batch 1000",
    ),
    Line(
        "one more round trip in a graph, forward and backward",
        "autograd_chain",
        "one more round trip",
        "2x2 tensor, forward and backward",
    ),
    Line("call beside a handler thread that computes in pure Python", "beside_compute", "p50"),
    Line("start of 11 workers, s", "workers", "start-up, fork to all joined", size=11),
    Line("start of 32 workers, s", "workers", "start-up, fork to all joined", size=32),
    Line("calls/s of 31 workers that all call one", "workers", "all call one, calls/s", size=32),
    Line("processor time of an idle worker, s/s", "idle", "processor time per idle worker"),
    Line("256 MB of weights published, until the last of 8 readers has them, ms", *WEIGHTS),
    Line("the same against Ray's `put` and 8 `get`s", *WEIGHTS, against="Ray"),
    Line("the same against Ray's, told to make no copies", *WEIGHTS, against="Ray, zero copies"),
    Line("a no-op to a group of 32 workers, µs", "groups", "group of 32, p50", "torch: loop and wait_all"),
    Line("small items/s of a queue, one at a time", "queue", "small items, one at a time", against=QUEUE),
    Line("small items/s of a queue, 256 under way", "queue", "small items, 256 under way", against=QUEUE),
)


_Key = tuple[str, str, str, int | None, str]


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The table, and below it what it was measured on; BenchError if the runs are of different machines or versions."""
    where = {hardware.line(outcome.facts) for outcome in outcomes}
    if len(where) != 1:
        raise BenchError(f"these are no runs of one machine with the same versions: {'; '.join(sorted(where))}")
    cells = [HEADINGS, ("---",) * len(HEADINGS), *_cells(outcomes)]
    table = ["|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in cells]
    return "\n".join([*table, "", *where, *(_said(outcome) for outcome in outcomes)])


def _said(outcome: Outcome) -> str:
    return ". ".join(filter(None, (outcome.facts["date"], machine.line(outcome.facts))))


def _cells(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    runs = [{_key(row): row for row in outcome.rows} for outcome in outcomes]
    return [_line(line.said, rows) for line in LINES if (rows := _rows_of(line, runs))]


def _key(row: Row | Line) -> _Key:
    return row.measurement, row.quantity, row.note, row.size, row.against


def _rows_of(line: Line, runs: Sequence[Mapping[_Key, Row]]) -> list[Row]:
    """Of each run that has it."""
    return [run[_key(line)] for run in runs if _key(line) in run]


def _line(said: str, rows: Sequence[Row]) -> tuple[str, ...]:
    ours = statistics.median(statistics.median(row.aiorpc) for row in rows)
    compared = [row for row in rows if row.ratio is not None]
    if not compared:
        return said, _number(ours), "-", "", ""
    theirs = statistics.median(statistics.median(row.torch) for row in compared)
    ratio = statistics.median(statistics.median(row.ratios) for row in compared)
    all_rounds = [each for row in compared for each in row.ratios]
    spread = f"{_number(min(all_rounds))} to {_number(max(all_rounds))}"
    other = " of ".join(filter(None, (_number(theirs), rows[0].against)))
    return said, _number(ours), other, f"**{_number(ratio)}x**", spread


def _number(value: float) -> str:
    """Three significant digits, thousands separated."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
