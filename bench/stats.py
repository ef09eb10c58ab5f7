"""Figures, their spread over rounds, ratios and targets. No I/O, no processes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

Better = Literal["lower", "higher"]


class BenchError(RuntimeError):
    """A measurement could not be taken; the text names the worker process or the figure."""


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of the rounds."""

    median: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value; BenchError if there is none."""
        if not values:
            raise BenchError("no round gave a figure")
        return cls(statistics.median(values), min(values), max(values))


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile of unsorted values; BenchError if there is none."""
    if not values:
        raise BenchError("no sample was taken")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def summary(nanoseconds: Sequence[int]) -> dict[str, float]:
    """p50, p99 and mean in microseconds, and the number of samples, of durations in nanoseconds."""
    return {
        "p50": percentile(nanoseconds, 50) / 1e3,
        "p99": percentile(nanoseconds, 99) / 1e3,
        "mean": sum(nanoseconds) / len(nanoseconds) / 1e3,
        "samples": float(len(nanoseconds)),
    }


@dataclass(frozen=True)
class Row:
    """One figure of both sides, one value per round.

    measurement: the name ``--only`` takes. quantity, unit: what was measured. better: which direction is good.
    aiorpc, torch: values by round, empty where a side cannot do it. target: the ratio that must be reached.
    limit: what the median of aiorpc's own figures must not exceed, in the row's unit.
    note: a condition the reader must know. size: the number of workers, where the row belongs to a curve over them.
    payload: the bytes of a tensor, where the row belongs to a curve over them.
    against: whose the values of the other side are, if not those of torch.distributed.rpc.
    """

    measurement: str
    quantity: str
    unit: str
    better: Better
    aiorpc: tuple[float, ...]
    torch: tuple[float, ...] = ()
    target: float | None = None
    note: str = ""
    size: int | None = None
    payload: int | None = None
    limit: float | None = None
    against: str = ""

    @property
    def ratios(self) -> tuple[float, ...]:
        """How many times better aiorpc was, round by round; empty where one side has no figure, or none but zero."""
        if len(self.aiorpc) != len(self.torch) or not all((*self.aiorpc, *self.torch)):
            return ()
        pairs = zip(self.aiorpc, self.torch, strict=True)
        return tuple(_times_better(ours, theirs, self.better) for ours, theirs in pairs)

    @property
    def ratio(self) -> Spread | None:
        """Spread of the ratios; None where there is nothing to compare."""
        return Spread.of(self.ratios) if self.ratios else None

    @property
    def passed(self) -> bool | None:
        """Whether the medians reach target and limit; None without either. Nothing to compare is a failure."""
        verdicts: list[bool] = []
        if self.target is not None:
            verdicts.append(self.ratio is not None and self.ratio.median >= self.target)
        if self.limit is not None:
            verdicts.append(bool(self.aiorpc) and Spread.of(self.aiorpc).median <= self.limit)
        return all(verdicts) if verdicts else None

    def to_json(self) -> dict[str, Any]:
        """The row and what follows from it, for readers of the file."""
        ratio = self.ratio
        derived = {
            "aiorpc_spread": asdict(Spread.of(self.aiorpc)) if self.aiorpc else None,
            "torch_spread": asdict(Spread.of(self.torch)) if self.torch else None,
            "ratio": asdict(ratio) if ratio else None,
            "passed": self.passed,
        }
        return asdict(self) | derived

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Row:
        """The row ``to_json`` wrote; derived entries are computed anew."""
        own = {each.name: data[each.name] for each in fields(cls) if each.name in data}  # older files lack some
        return cls(**own | {"aiorpc": tuple(own["aiorpc"]), "torch": tuple(own["torch"])})


def _times_better(ours: float, theirs: float, better: Better) -> float:
    """The ratio that is above 1 when ours is the better figure."""
    top, bottom = (theirs, ours) if better == "lower" else (ours, theirs)
    return top / bottom


@dataclass(frozen=True)
class Failure:
    """A measurement that gave no figures, and why."""

    measurement: str
    error: str


@dataclass(frozen=True)
class Outcome:
    """All of one run. facts: machine, versions, command. seconds: how long it took. took: of these each measurement.

    cut: the measurements that had fewer rounds than planned, as their time was over.
    """

    facts: dict[str, str]
    rows: tuple[Row, ...]
    failures: tuple[Failure, ...]
    seconds: float
    took: dict[str, float] = field(default_factory=dict)
    cut: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dictionary; ``from_json`` reads it back."""
        return {
            "facts": self.facts,
            "seconds": self.seconds,
            "took": self.took,
            "cut": self.cut,
            "rows": [row.to_json() for row in self.rows],
            "failures": [asdict(failure) for failure in self.failures],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Outcome:
        """The outcome ``to_json`` wrote."""
        rows = tuple(Row.from_json(row) for row in data["rows"])
        failures = tuple(Failure(**failure) for failure in data["failures"])
        took, cut = dict(data.get("took", {})), tuple(data.get("cut", ()))  # older files lack them
        return cls(dict(data["facts"]), rows, failures, data["seconds"], took, cut)
