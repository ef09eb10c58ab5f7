"""Whether a figure grew over time: by the slope of what was sampled after the warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy

WARM_UP = 0.25  # of the run: caches fill, threads start, the allocator gets its arenas
LEAST = 8  # samples, below which a slope says nothing


@dataclass(frozen=True)
class Allowance:
    """By how much a figure may grow within one run: the larger one of an amount and a share of its level."""

    amount: float
    share: float


#: Times are at the mercy of what else runs on the machine; leaks are what the others are for.
ALLOWED = {
    "rss": Allowance(8.0, 0.04),
    "pss": Allowance(8.0, 0.05),
    "uss": Allowance(8.0, 0.05),
    "descriptors": Allowance(3.0, 0.05),
    "threads": Allowance(2.0, 0.02),
    "segments": Allowance(1.0, 0.0),
    "tasks": Allowance(2.0, 0.02),
    "objects": Allowance(300.0, 0.02),
    "p50": Allowance(1.0, 1.0),
    "p99": Allowance(20.0, 2.0),
}


@dataclass(frozen=True)
class Verdict:
    """What became of one figure of one member after the warm-up. growth: from there to the end, in the gauge's unit."""

    member: str
    gauge: str
    level: float
    growth: float
    allowed: float

    @property
    def grew(self) -> bool:
        """Whether it grew by more than is allowed."""
        return self.growth > self.allowed


def judge(member: str, gauge: str, times: Sequence[float], values: Sequence[float]) -> Verdict | None:
    """The verdict on one series; None where there is too little of it after the warm-up."""
    found = [(time, value) for time, value in zip(times, values, strict=True) if time >= times[-1] * WARM_UP]
    if len(found) < LEAST:
        return None
    after, sampled = numpy.array(found).T
    level = float(numpy.median(sampled))
    growth = slope(after, sampled) * float(after[-1] - after[0])
    allowance = ALLOWED[gauge]
    return Verdict(member, gauge, level, growth, max(allowance.amount, allowance.share * level))


def slope(times: numpy.ndarray, values: numpy.ndarray) -> float:
    """Per second: the median of the slopes between all pairs (Theil and Sen), which single outliers do not move."""
    first, second = numpy.triu_indices(len(times), 1)
    apart = times[second] - times[first]
    return float(numpy.median((values[second] - values[first])[apart > 0] / apart[apart > 0]))
