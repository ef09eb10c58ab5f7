"""The cohorts that are up, kept from measurement to measurement, and the loop that alternates the sides."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

from .cohort import Cohort
from .sides import SideName, Style

Key = Literal["aiorpc", "aiorpc awaited", "aiorpc switch", "torch"]
Figures = dict[str, float]

PAIR = ("server", "client")
SWITCH_INTERVAL = 0.0005


@dataclass(frozen=True)
class Plan:
    """How much to measure. rounds: of each pair. seconds: each side's share of a round. sizes: numbers of workers."""

    rounds: int = 5
    seconds: float = 1.0
    sizes: tuple[int, ...] = (2, 4, 8, 16, 32)
    pending_calls: int = 10_000
    episodes: int = 8

    @classmethod
    def quick(cls) -> Plan:
        """A look in under 90 seconds."""
        return cls(rounds=3, seconds=0.25, sizes=(2, 8), pending_calls=2_000, episodes=3)


@dataclass(frozen=True)
class Setup:
    """How a pair of workers is made. null: use torch's module in aiorpc's place."""

    side: SideName
    style: Style = "blocking"
    options: dict[str, Any] = field(default_factory=dict)


_SETUPS: dict[Key, Setup] = {
    "aiorpc": Setup("aiorpc"),
    "aiorpc awaited": Setup("aiorpc", "awaited"),
    "aiorpc switch": Setup("aiorpc", options={"switch_interval": SWITCH_INTERVAL}),
    "torch": Setup("torch"),
}


class Stage:
    """Starts a pair (server and client) of workers when it is first asked for and keeps it for later measurements.

    null: an A/A run, torch.distributed.rpc on both sides, whose ratios must be near 1: it shows the noise.
    """

    def __init__(self, plan: Plan, *, null: bool = False) -> None:
        self.plan = plan
        self.null = null
        self._pairs: dict[Key, Cohort] = {}

    def side(self, side: SideName) -> SideName:
        """The side to really use: torch in the place of aiorpc in an A/A run."""
        return "torch" if self.null else side

    def pair(self, key: Key) -> Cohort:
        """The running pair of that kind."""
        if key not in self._pairs:
            setup = _SETUPS[key]
            cohort = Cohort(self.side(setup.side), PAIR, setup.style, setup.options)
            self._pairs[key] = cohort.__enter__()
        return self._pairs[key]

    def client(self, key: Key, function: Callable[..., Any], /, **kwargs: Any) -> Figures:
        """Run a measurement in the client of a pair."""
        figures: Figures = self.pair(key).run("client", function, **kwargs)
        return figures

    def alternate(self, cases: dict[str, Callable[[], Figures]]) -> dict[str, list[Figures]]:
        """Every case once per round, in turn, so that what disturbs the machine disturbs all alike."""
        results: dict[str, list[Figures]] = {label: [] for label in cases}
        for _ in range(self.plan.rounds):
            for label, case in cases.items():
                results[label].append(case())
        return results

    def reset(self) -> None:
        """Drop all pairs, whatever state they are in; the next measurement starts new ones."""
        for cohort in self._pairs.values():
            cohort.kill()
        self._pairs.clear()

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.reset)
            if kind is None:
                for cohort in self._pairs.values():
                    cohort.close()


def column(results: Sequence[Figures], quantity: str) -> tuple[float, ...]:
    """One quantity of every round."""
    return tuple(figures[quantity] for figures in results)


def progress(text: str) -> None:
    """Say on stderr what is being measured."""
    print(text, file=sys.stderr, flush=True)
