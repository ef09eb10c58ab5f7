"""What a campaign of rounds came to, as JSON and as a document."""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from .invariants import LOOKED_AT
from .plans import KINDS
from .rounds import Verdict

ROOT = Path(__file__).parents[2]
SLOWEST = 5  # rounds that are told


class Campaign:
    """Rounds of one seed. told: what is said of them, as it can be merged with what is said of others."""

    def __init__(self, seed: int) -> None:
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in ("counts", "faults", "forms", "failed")}
        self._rounds: list[dict[str, Any]] = []
        self.found: list[dict[str, Any]] = []
        self._seed = seed

    def add(self, verdict: Verdict, again: str) -> None:
        """One more round. again: the command that plays it once more."""
        plan = verdict.plan
        self._rounds.append({"seconds": round(verdict.seconds, 1), "round": plan.number, "plan": str(plan)})
        counts = {"operations": verdict.operations, "runs": verdict.runs, "processes": verdict.processes}
        self._take({"counts": counts, "faults": verdict.faults, "forms": {plan.form: 1}, "failed": verdict.failed})
        if verdict.wrong:
            wrong = [line.replace(f"{ROOT}/", "") for line in verdict.wrong[:20]]
            self.found.append({"round": plan.number, "again": again, "plan": str(plan), "wrong": wrong})

    def merge(self, told: Mapping[str, Any]) -> None:
        """What another campaign of this seed has said."""
        self._rounds += told["rounds"]
        self.found += told["found"]
        self._take(told)

    def _take(self, counts: Mapping[str, Mapping[str, int]]) -> None:
        for name, counter in self._counts.items():
            counter.update(counts[name])

    def told(self) -> dict[str, Any]:
        """All of it, for `merge`."""
        return {"rounds": self._rounds, "found": self.found, **self._counts}

    @property
    def summary(self) -> str:
        """In one line."""
        found = ", ".join(str(each["round"]) for each in self.found) or "none"
        return f"{len(self._rounds):,} rounds of seed {self._seed}; something is wrong in: {found}"

    def write(self, path: Path, seconds: float) -> None:
        """To that file, and the document beside it. seconds: that it took."""
        each = sorted(self._rounds, key=lambda one: -float(one["seconds"]))
        middle = each[len(each) // 2]["seconds"] if each else 0.0
        said = self.told() | {
            "seed": self._seed,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": {
                "cores": os.cpu_count(),
                "system": platform.platform(),
                "python": platform.python_version(),
                "torch": torch.__version__,
            },
            "rounds": len(each),
            "seconds": {"all": round(seconds), "median": middle},
            "slowest": each[:SLOWEST],
        }
        path.write_text(json.dumps(said, indent=1, sort_keys=True) + "\n")
        path.with_suffix(".md").write_text(readable(said))


def readable(said: Mapping[str, Any]) -> str:
    """What a report says, as a document."""
    machine, counts, seconds = said["machine"], said["counts"], said["seconds"]
    failed = sum(said["failed"].values())
    errors = ", ".join(f"{count:,} {error}" for error, count in sorted(said["failed"].items())) or "none"
    parts = [
        "# Chaos: a campaign",
        f"Written by `python -m tests.chaos --report`; do not edit it. {said['rounds']:,} rounds of seed "
        f"{said['seed']} in {seconds['all']:,} s (median of a round {seconds['median']} s), on {said['date']}; Python "
        f"{machine['python']}, torch {machine['torch']}, {machine['system']}, {machine['cores']} cores.",
        f"{counts['processes']:,} processes made {counts['operations']:,} operations whose end is known (of those that "
        f"were killed it is not), of which {failed:,} failed: {errors}. Handlers ran {counts['runs']:,} times.",
        _table("what happens", "times", {f"{kind}: {KINDS[kind]}": count for kind, count in said["faults"].items()}),
        _table("group", "rounds", said["forms"]),
        "What was looked at in each round:",
        _lines(f"- {each}" for each in LOOKED_AT),
        "The slowest rounds:",
        _lines(f"- {each['seconds']} s: round {each['round']}, {each['plan']}" for each in said["slowest"]),
        "What was wrong:" if said["found"] else "Nothing was wrong.",
        *(
            f"- `{each['again']}` ({each['plan']})\n{_lines(f'  - {line}' for line in each['wrong'])}"
            for each in said["found"]
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _table(first: str, second: str, counts: Mapping[str, int]) -> str:
    rows = [(first, second), ("---", "---"), *((name, f"{count:,}") for name, count in sorted(counts.items()))]
    return _lines(f"| {name} | {count} |" for name, count in rows)


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)
