"""The cohorts that are up, kept from measurement to measurement, and the loop that alternates the sides."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .cohort import Cohort
from .hosts import Hosts
from .sides import CLIENT, PAIR, SideName, Style

Figures = dict[str, float]


@dataclass(frozen=True)
class Plan:
    """How much to measure. rounds: of each pair. seconds: each side's share of a round. sizes: numbers of workers.

    pending_calls: how many at once. episodes, steps: of batch_rl. cohort_rounds: of what starts new workers every time.
    transfers: of large tensors, at least so many in each round, however long they take. large_rounds: of the largest.
    tcp_rounds: of TCP alone. first_rounds: of first transfers. beside: seconds of calls beside a computation.
    idle: seconds of doing nothing. iterations: training steps while memory is watched. operations: in a batch whose
    functions are counted. program_rounds: of whole programs. limit: seconds that all measurements together may take;
    where a machine is too slow for that, each has fewer rounds.
    """

    rounds: int = 5
    seconds: float = 0.8
    sizes: tuple[int, ...] = (2, 4, 11, 32)
    pending_calls: int = 10_000
    episodes: int = 5
    steps: int = 500
    cohort_rounds: int = 3
    transfers: int = 5
    large_rounds: int = 5
    tcp_rounds: int = 3
    first_rounds: int = 9
    beside: float = 1.0  # a call may take 30 ms there: a shorter box would hold too few
    idle: float = 1.0
    iterations: int = 1_000
    operations: int = 200
    program_rounds: int = 5
    limit: float = 820.0

    @classmethod
    def quick(cls) -> Plan:
        """A look in under four minutes."""
        few = cls(rounds=3, cohort_rounds=1, large_rounds=2, tcp_rounds=1, first_rounds=3, program_rounds=1)
        small = replace(few, transfers=3, limit=190.0, sizes=(2, 11), pending_calls=2_000, episodes=2, steps=200)
        return replace(small, seconds=0.2, beside=0.3, idle=0.4, iterations=300, operations=50)


@dataclass(frozen=True)
class Setup:
    """How a pair of workers is made."""

    side: SideName
    style: Style = "blocking"
    options: dict[str, Any] = field(default_factory=dict)


#: By the names that measurements ask for.
_SETUPS: dict[str, Setup] = {
    "aiorpc": Setup("aiorpc"),
    "aiorpc awaited": Setup("aiorpc", "awaited"),
    "aiorpc awaited, sleepy": Setup("aiorpc", "awaited", {"busy_wait": 0}),
    "aiorpc dedicated": Setup("aiorpc", "awaited", {"dedicated_loop": True}),
    "aiorpc patient": Setup("aiorpc", options={"switch_interval": None}),
    "aiorpc sleepy": Setup("aiorpc", options={"busy_wait": 0}),
    "torch": Setup("torch"),
}


def style_of(key: str) -> Style:
    """Whether a pair of that kind blocks or awaits."""
    return _SETUPS[key].style


class Stage:
    """Starts a pair (server and client) of workers when it is first asked for and keeps it for later measurements.

    null: an A/A run, torch.distributed.rpc on both sides, whose ratios must be near 1: it shows the noise.
    """

    def __init__(self, plan: Plan, *, null: bool = False) -> None:
        self.plan = plan
        self.null = null
        self._pairs: dict[str, Cohort] = {}
        self._active: Cohort | None = None
        self.due = math.inf  # on `time.monotonic`: from then on no further rounds
        self.cut = False  # whether rounds were left out since `due` was set

    def side(self, side: SideName) -> SideName:
        """The side to really use: torch in the place of aiorpc in an A/A run."""
        return "torch" if self.null else side

    def pair(self, key: str) -> Cohort:
        """The running pair of that kind."""
        if key not in self._pairs:
            setup = _SETUPS[key]
            self._pairs[key] = self.start(setup.side, PAIR, setup.style, setup.options)
        return self.activate(self._pairs[key])

    def start(
        self,
        side: SideName,
        names: Sequence[str],
        style: Style = "blocking",
        options: dict[str, Any] | None = None,
        *,
        counted: bool = False,
        hosts: Hosts | None = None,
    ) -> Cohort:
        """Start a cohort, which the caller closes, while all others are paused. In an A/A run torch plays aiorpc."""
        self.pause()
        cohort = Cohort(self.side(side), names, style, options, counted=counted, hosts=hosts)
        self._active = cohort.start()
        return cohort

    def activate(self, cohort: Cohort) -> Cohort:
        """Let this cohort run and no other."""
        if self._active is not cohort:
            self.pause()
            cohort.resume()
            self._active = cohort
        return cohort

    def pause(self) -> None:
        """Let no cohort run."""
        if self._active is not None:
            self._active.pause()
            self._active = None

    def client(self, key: str, function: Callable[..., Any], /, **kwargs: Any) -> Figures:
        """Run a measurement in the client of a pair."""
        figures: Figures = self.pair(key).run(CLIENT, function, **kwargs)
        return figures

    def new_client(
        self, side: SideName, function: Callable[..., Any], /, style: Style = "blocking", **kwargs: Any
    ) -> Figures:
        """The same in a pair that is made for this."""
        with self.start(side, PAIR, style) as cohort:
            figures: Figures = cohort.run(CLIENT, function, **kwargs)
        return figures

    def alternate(
        self, cases: Mapping[str, Callable[[], Figures]], rounds: int | None = None, first: int = 1
    ) -> dict[str, list[Figures]]:
        """Every case once per round, in turn, so that what disturbs the machine disturbs all alike.

        The first round is left out: what it touches for the first time (pages, caches, threads) would count.
        rounds: that count, if not the plan's. first: 0 where everything was touched before.
        """
        return self._in_turn(cases, rounds or self.plan.rounds, first)

    def alternate_anew(
        self, cases: Mapping[str, Callable[[], Figures]], rounds: int | None = None
    ) -> dict[str, list[Figures]]:
        """The same for cases that start their own workers each time: fewer rounds, and the first counts."""
        return self._in_turn(cases, rounds or self.plan.cohort_rounds, first=0)

    def _in_turn(self, cases: Mapping[str, Callable[[], Figures]], rounds: int, first: int) -> dict[str, list[Figures]]:
        results: dict[str, list[Figures]] = {label: [] for label in cases}
        for _ in self.rounds(rounds, first):
            for label, case in cases.items():
                results[label].append(case())
        return {label: figures[first:] for label, figures in results.items()}

    def rounds(self, number: int, first: int = 0) -> Iterator[int]:
        """So many, and `first` before them that do not count; fewer, but one at least, once it is `due`."""
        for done in range(first + number):
            if done > first and time.monotonic() > self.due:
                self.cut = True
                return
            yield done

    def reset(self) -> None:
        """Drop all pairs, whatever state they are in; the next measurement starts new ones."""
        for cohort in self._pairs.values():
            cohort.kill()
        self._pairs.clear()
        self._active = None

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.reset)
            if kind is None:
                for cohort in self._pairs.values():
                    self.activate(cohort).close()


def column(results: Sequence[Figures], quantity: str) -> tuple[float, ...]:
    """One quantity of every round."""
    return tuple(figures[quantity] for figures in results)


def progress(text: str) -> None:
    """Say on stderr what is being measured."""
    print(text, file=sys.stderr, flush=True)
