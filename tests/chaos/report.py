"""What a campaign of rounds came to, as JSON and as a document."""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .invariants import LOOKED_AT
from .plans import KINDS
from .rounds import Verdict

SLOWEST = 5  # rounds that are told


class Campaign:
    """Rounds of one seed."""

    def __init__(self, seed: int, kinds: Sequence[str]) -> None:
        self.found: list[Verdict] = []
        self._seed = seed
        self._kinds = kinds
        self._rounds: list[tuple[float, int, str]] = []
        self._counts: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._forms: Counter[str] = Counter()

    def add(self, verdict: Verdict) -> None:
        """One more round."""
        plan = verdict.plan
        self._rounds.append((verdict.seconds, plan.number, str(plan)))
        self._counts.update(operations=verdict.operations, runs=verdict.runs, processes=verdict.processes)
        self._faults += verdict.faults
        self._failed += verdict.failed
        self._forms[f"{'free' if plan.free else 'fixed'} at {plan.meeting}, {'+'.join(plan.transports)}"] += 1
        if verdict.wrong:
            self.found.append(verdict)

    def again(self, verdict: Verdict) -> str:
        """The command that plays a round once more."""
        kinds = f" --kinds {' '.join(self._kinds)}" if len(self._kinds) < len(KINDS) else ""
        return f"python -m tests.chaos --seed {self._seed} --first {verdict.plan.number} --rounds 1{kinds}"

    @property
    def summary(self) -> str:
        """In one line."""
        seconds = sum(each for each, _, _ in self._rounds)
        found = ", ".join(str(each.plan.number) for each in self.found) or "none"
        return f"{len(self._rounds):,} rounds of seed {self._seed} in {seconds:,.0f} s; something is wrong in: {found}"

    def write(self, path: Path) -> None:
        """To that file, and the document beside it."""
        said = self._said()
        path.write_text(json.dumps(said, indent=1, sort_keys=True) + "\n")
        path.with_suffix(".md").write_text(readable(said))

    def _said(self) -> dict[str, Any]:
        seconds = sorted(each for each, _, _ in self._rounds)
        return {
            "seed": self._seed,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": {
                "cores": os.cpu_count(),
                "system": platform.platform(),
                "python": platform.python_version(),
                "torch": torch.__version__,
            },
            "rounds": len(seconds),
            "seconds": {"all": round(sum(seconds)), "median": round(seconds[len(seconds) // 2], 1)},
            "slowest": [
                {"seconds": round(each, 1), "round": number, "plan": plan}
                for each, number, plan in sorted(self._rounds, reverse=True)[:SLOWEST]
            ],
            "counts": dict(self._counts),
            "faults": dict(self._faults),
            "forms": dict(self._forms),
            "failed": dict(self._failed),
            "found": [
                {"again": self.again(each), "plan": str(each.plan), "wrong": each.wrong[:20]} for each in self.found
            ],
        }


def readable(said: dict[str, Any]) -> str:
    """What a report says, as a document."""
    machine, counts, seconds = said["machine"], said["counts"], said["seconds"]
    failed = sum(said["failed"].values())
    errors = ", ".join(f"{count:,} {error}" for error, count in sorted(said["failed"].items())) or "none"
    found = [
        f"- `{each['again']}` ({each['plan']})\n{_lines(f'  - {line}' for line in each['wrong'])}"
        for each in said["found"]
    ]
    parts = [
        "# Chaos: a campaign",
        f"Written by `python -m tests.chaos --report`; do not edit it. {said['rounds']:,} rounds of seed "
        f"{said['seed']} in {seconds['all']:,} s (median {seconds['median']} s), on {said['date']}; Python "
        f"{machine['python']}, torch {machine['torch']}, {machine['system']}, {machine['cores']} cores.",
        f"{counts['processes']:,} processes made {counts['operations']:,} operations whose end is known (of those that "
        f"were killed it is not), of which {failed:,} failed: {errors}. Handlers ran {counts['runs']:,} times.",
        _table("what happens", "times", {f"{kind}: {KINDS[kind]}": count for kind, count in said["faults"].items()}),
        _table("group", "rounds", said["forms"]),
        "What was looked at in each round:",
        _lines(f"- {each}" for each in LOOKED_AT),
        "The slowest rounds:",
        _lines(f"- {each['seconds']} s: round {each['round']}, {each['plan']}" for each in said["slowest"]),
        "What was wrong:" if found else "Nothing was wrong.",
        *found,
    ]
    return "\n\n".join(parts) + "\n"


def _table(first: str, second: str, counts: Mapping[str, int]) -> str:
    rows = [(first, second), ("---", "---"), *((name, f"{count:,}") for name, count in sorted(counts.items()))]
    return _lines(f"| {name} | {count} |" for name, count in rows)


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)
