"""The list of measurements, and running some of them."""

from __future__ import annotations

import itertools
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import (
    bulk,
    counting,
    dropin,
    gradients,
    groups,
    hardware,
    idle,
    latency,
    machine,
    members,
    memory,
    messages,
    publishing,
    publishing_hosts,
    queues,
    scaling,
    throughput,
    tls,
    training,
)
from .stage import Plan, Stage, progress
from .stats import Failure, Outcome, Row

SPARE = 0.2  # of the limit, for whatever takes longer than its share


@dataclass(frozen=True)
class Measurement:
    """A name for ``--only``, what it is in one line, and what takes it.

    share: of the time of a run, which is about the seconds that it takes; 0: it has no limit. compared: taken also
    when nothing is named.
    """

    name: str
    summary: str
    take: Callable[[Stage], list[Row]]
    share: float
    compared: bool = True


MEASUREMENTS: tuple[Measurement, ...] = (
    Measurement("noop_blocking", "rpc_sync of a Python no-op, µs", latency.noop_blocking, 12),
    Measurement("noop_awaited", "awaited no-op against torch's rpc_sync, µs", latency.noop_awaited, 16),
    Measurement("noop_options", "no-ops by options, µs", latency.noop_options, 26),
    Measurement("inflight512", "calls/s with 512 under way", throughput.in_flight, 20),
    Measurement("tensor_2x2", "a 2x2 tensor echoed, blocking and awaited, µs", latency.tensor_2x2, 15),
    Measurement("tensors", "4 KB to 256 MB sent and echoed, blocking, µs", bulk.tensors, 100),
    Measurement("first_transfer", "the first tensor of each size between new processes, µs", bulk.first_transfer, 27),
    Measurement("tcp_only", "tensors with nothing but TCP between the two, µs", bulk.tcp_only, 80),
    Measurement("tls", "calls and tensors by TLS against plain TCP, times as long", tls.tls, 0, compared=False),
    Measurement("concurrent", "four 64 MB sent at once, GB/s", bulk.concurrent, 14),
    Measurement("state_dict", "weights of a ResNet-50 sent, 1/s", bulk.state_dict, 7),
    Measurement(
        "publish",
        "weights for 8 readers of this host: ms, memory, cost; and for other hosts",
        lambda stage: publishing.publish(stage) + publishing_hosts.publish(stage),
        0,
        compared=False,
    ),
    Measurement("loop_lag", "lag of the event loops while 256 MB are sent, ms", bulk.loop_lag, 16),
    Measurement("burst", "memory of the arena around a burst", bulk.burst, 4),
    Measurement("batch_rl", "steps/s of the batch_rl example with 5 observers", training.batch_rl, 75),
    Measurement("batch_ps", "images/s of the batch_ps example with ResNet-50 and 2 trainers", training.batch_ps, 40),
    Measurement("autograd_step", "training steps/s of a small model on two workers", gradients.step, 22),
    Measurement("autograd_shards", "two large layers, against one process and the copies, ms", gradients.shards, 31),
    Measurement("autograd_chain", "cost of a round trip in the graph, µs", gradients.chain, 14),
    Measurement("autograd_memory", "memory of both ends over many training steps", gradients.memory, 70),
    Measurement(
        "dropin", "steps/s of an old program, unmodified, by python -m aiorpc.compat.torch", dropin.dropin, 110
    ),
    Measurement(
        "beside_compute", "no-op beside a handler that computes in pure Python, µs", latency.beside_compute, 27
    ),
    Measurement("workers", "cost per call and start-up as workers grow", scaling.workers, 80),
    Measurement("groups", "a call to 32 workers at once, against a loop of calls", groups.groups, 0, compared=False),
    Measurement(
        "members", "free groups of 16 to 256 members: forming, a call to all", members.members, 0, compared=False
    ),
    Measurement("queue", "items/s of a queue, small ones and of 1 MB", queues.queue, 0, compared=False),
    Measurement("idle", "processor time of idle workers", idle.idle, 13),
    Measurement("memory", "resident bytes per connection and per pending call", memory.memory, 20),
    Measurement(
        "functions",
        "Python functions and messages of one operation, both ends (with --only alone)",
        lambda stage: counting.counted(stage) + messages.counted(stage),
        0,
        compared=False,
    ),
)


def choose(names: Sequence[str] | None) -> list[Measurement]:
    """The measurements of these names in the suite's order; ValueError names unknown ones.

    Without names, all that compare the sides.
    """
    known = {each.name for each in MEASUREMENTS}
    if unknown := set(names or ()) - known:
        raise ValueError(f"no measurement {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    return [each for each in MEASUREMENTS if (each.compared if names is None else each.name in names)]


def dues(chosen: Sequence[Measurement], limit: float) -> list[float]:
    """For each measurement, the second of the run from which on it has no further rounds.

    Each has its share of the limit, what those before it have left of theirs, and of the `SPARE` what is still there.
    Few measurements have no more than in a whole run.
    """
    if limit == math.inf:
        return [math.inf] * len(chosen)
    scale = limit * (1.0 - SPARE) / sum(each.share for each in MEASUREMENTS)
    ends = itertools.accumulate((scale * each.share for each in chosen), initial=limit * SPARE)
    return [end if each.share else math.inf for each, end in zip(chosen, itertools.islice(ends, 1, None), strict=True)]


def run(chosen: Sequence[Measurement], plan: Plan, arguments: Sequence[str], *, null: bool = False) -> Outcome:
    """Take the measurements one after another. One that fails is reported and does not stop the others."""
    begin = time.monotonic()
    found = hardware.facts(arguments, plan.rounds, plan.seconds, null=null) | machine.speed()
    rows: list[Row] = []
    failures: list[Failure] = []
    took: dict[str, float] = {}
    cut: list[str] = []
    with Stage(plan, null=null) as stage:
        for measurement, due in zip(chosen, dues(chosen, plan.limit), strict=True):
            before = time.monotonic()
            progress(f"{before - begin:5.0f} s  {measurement.name}: {measurement.summary}")
            stage.due, stage.cut = begin + due, False
            try:
                rows += measurement.take(stage)
            except Exception:
                failures.append(Failure(measurement.name, traceback.format_exc()))
                stage.reset()
            took[measurement.name] = round(time.monotonic() - before, 1)
            cut += [measurement.name] if stage.cut else []
    return Outcome(found, tuple(rows), tuple(failures), time.monotonic() - begin, took, tuple(cut))
