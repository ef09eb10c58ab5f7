"""``python -m bench.soak --minutes 60``: load a cluster for so long, and say what of it grows.

Four members stay, one of them with other members of its host alone, two as if they were on other hosts, of which one
breaks connections. One leaves and joins again in the same process, and guests come in processes of their own, of which
every other one is killed. All of them make calls, streams, references, backward passes, large tensors and batches.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .. import hardware
from ..stats import BenchError
from . import gauges, picture
from .cluster import GUEST, STORE, Cluster, cluster
from .member import Sample
from .verdict import Verdict, judge

DEFAULT_OUT = Path(__file__).parents[1] / "results" / "soak"
SAMPLES = 240  # in the whole run, and at most one each second
STAY, CUTS = 10.0, 10.0  # seconds; as many come and go within the warm-up as members remember
SHORTEST = 8.0  # of a stay in a short run, as joining takes its time


@dataclass
class Series:
    """What was sampled: by member and gauge, beside the seconds since the start. last: what each said last."""

    times: dict[str, list[float]] = field(default_factory=dict)
    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    last: dict[str, Sample] = field(default_factory=dict)

    def add(self, member: str, seconds: float, found: dict[str, float]) -> None:
        """Note one sample of a member; of what it lacks nothing is noted."""
        self.times.setdefault(member, []).append(round(seconds, 2))
        series = self.values.setdefault(member, {})
        for name in gauges.GAUGES:
            series.setdefault(name, []).append(round(found.get(name, float("nan")), 4))

    def verdicts(self) -> list[Verdict]:
        """On each figure of each member."""
        found = []
        for member, series in self.values.items():
            for name, values in series.items():
                pairs = [(t, v) for t, v in zip(self.times[member], values, strict=True) if v == v]
                verdict = judge(member, name, [t for t, _ in pairs], [v for _, v in pairs]) if pairs else None
                found += [verdict] if verdict else []
        return found

    def work(self) -> dict[str, dict[str, int]]:
        """What came of the load, of all members together: done, missed and failed by kind."""
        totals: dict[str, Counter[str]] = {"done": Counter(), "missed": Counter(), "failed": Counter()}
        for sample in self.last.values():
            for name, total in totals.items():
                total.update(getattr(sample.done, name))
        return {name: dict(sorted(total.items())) for name, total in totals.items()}

    def seconds(self) -> float:
        """When the last sample was taken."""
        return max(times[-1] for times in self.times.values())

    def errors(self) -> dict[str, str]:
        """The first failure of each kind."""
        return {name: text for sample in self.last.values() for name, text in sample.done.errors.items()}

    def counts(self) -> dict[str, int]:
        """What members have done beside the load."""
        return dict(sum((Counter(sample.counts) for sample in self.last.values()), Counter()))


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    options.add_argument("--minutes", type=float, default=60.0, help="for how long (60)")
    options.add_argument("--seed", type=int, default=0, help="of what is random about the guests (0)")
    options.add_argument("--out", type=Path, default=DEFAULT_OUT, help="files to write, without .json and .png")
    return options


async def run(series: Series, seconds: float, seed: int) -> Counter[str]:
    """Load a cluster for so long, and note what is sampled; what was done beside the load.

    BenchError if a member fails; what was sampled before is noted.
    """
    stay = min(STAY, max(SHORTEST, seconds / 20))
    async with cluster(stay, min(CUTS, stay / 2), seed) as made:
        await made.start_all()
        guests = asyncio.create_task(made.keep_guests())
        try:
            await _sample(made, series, seconds, guests)
        finally:
            guests.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await guests
        await made.leave()
        return made.events


async def _sample(made: Cluster, series: Series, seconds: float, guests: asyncio.Task[None]) -> None:
    started = time.monotonic()
    every = max(1.0, seconds / SAMPLES)
    said, told = 0.0, dict[str, str]()
    steady = {name: member for name, member in made.members.items() if name != GUEST}
    while (now := time.monotonic() - started) < seconds:
        samples = await asyncio.gather(*(member.sample() for member in steady.values()))
        series.last = dict(zip(steady, samples, strict=True))
        for name, sample in series.last.items():
            series.add(name, time.monotonic() - started, sample.gauges)
        series.add(STORE, time.monotonic() - started, gauges.of_process(made.store.pid))
        for name, text in (errors := series.errors()).items():
            if name not in told:
                print(f"FAILED {name}: {text}", flush=True)
        told = errors
        if now - said >= 60 or not said:
            said = now
            print(progress(series, now), flush=True)
        await asyncio.wait([guests], timeout=max(0.0, started + now + every - time.monotonic()))
        if guests.done():
            guests.result()  # a guest that could not join or leave


def progress(series: Series, seconds: float) -> str:
    """One line about how it stands."""
    work = series.work()
    done, missed, failed = (sum(work[each].values()) for each in ("done", "missed", "failed"))
    parts = [
        f"{member} {values['uss'][-1]:.0f} MiB {values['descriptors'][-1]:.0f} fds"
        + (f" {values['objects'][-1]:.0f} objects" if member != STORE else "")
        for member, values in series.values.items()
    ]
    return f"{seconds / 60:6.1f} min  done {done}, missed {missed}, failed {failed}; {'; '.join(parts)}"


def outcome(series: Series, events: Counter[str], arguments: Sequence[str], seconds: float) -> dict[str, Any]:
    """All that was found, for JSON."""
    facts = hardware.facts(arguments, 0, 0.0)
    for each in ("sides", "method"):
        del facts[each]
    facts["command"] = shlex.join(["python", "-m", "bench.soak", *arguments])
    return {
        "facts": {**facts, "load at the end": f"{os.getloadavg()[0]:.2f}"},
        "seconds": round(seconds),
        "work": series.work(),
        "events": {**events, **series.counts()},
        "errors": series.errors(),
        "verdicts": [{**asdict(verdict), "grew": verdict.grew} for verdict in series.verdicts()],
        "units": gauges.GAUGES,
        "members": {
            member: {"time": series.times[member], **_without_missing(values)}
            for member, values in series.values.items()
        },
    }


def _without_missing(values: dict[str, list[float]]) -> dict[str, list[float | None]]:
    """JSON has no word for what is no number."""
    return {
        name: [value if value == value else None for value in series]
        for name, series in values.items()
        if any(value == value for value in series)
    }


def show(found: dict[str, Any]) -> bool:
    """Print what came of it; whether all is well."""
    for verdict in found["verdicts"]:
        unit = found["units"][verdict["gauge"]]
        line = (
            f"{verdict['member']:10} {verdict['gauge']:12} {verdict['level']:12.2f} {unit:4} "
            f"{verdict['growth']:+10.2f} of {verdict['allowed']:8.2f} allowed"
        )
        print(f"{line}   GREW" if verdict["grew"] else line)
    print("work:", json.dumps(found["work"]))
    print("events:", json.dumps(found["events"]))
    grew = [verdict for verdict in found["verdicts"] if verdict["grew"]]
    print(f"{len(grew)} of {len(found['verdicts'])} figures grew; {sum(found['work']['failed'].values())} failures")
    return not grew and not found["work"]["failed"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 if something grew or failed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    series, events, failed = Series(), Counter[str](), False
    try:
        events = asyncio.run(run(series, options.minutes * 60, options.seed))
    except BenchError as error:
        print(f"python -m bench.soak: {error}", file=sys.stderr)
        if not series.times:
            return 1
        failed = True
    found = outcome(series, events, given, series.seconds())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(found) + "\n", encoding="utf-8")
    print(f"wrote {options.out.with_suffix('.json')}")
    try:
        picture.draw(found, options.out.with_suffix(".png"))
        print(f"wrote {options.out.with_suffix('.png')}")
    except ImportError as error:
        print(f"no picture: {error}", file=sys.stderr)
    return 0 if show(found) and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
