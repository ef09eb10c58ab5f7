"""`python -m tests.fuzz`: fuzz every target in turn, each in a process of its own; `--help` says how."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.fuzz import corpora
from tests.fuzz.targets import TARGETS, Target

STATUS = re.compile(r"^#\d+\s+(\w+)\s+cov: (\d+) ft: (\d+) corp: (\d+)/")
PAUSE = 5.0  # seconds between two lines of progress


@dataclass
class Outcome:
    """What became of one target. coverage: branches of the code under test that were seen; 0 without atheris."""

    target: str
    about: str
    allowed: list[str]
    inputs: int = 0
    accepted: int = 0
    seconds: float = 0.0
    coverage: int = 0
    corpus: int = 0
    memory_mb: int = 0
    finding: str = ""
    error: str = ""


def run(target: Target, inputs: int, seconds: int, seed: int, keep: bool) -> Outcome:
    """Fuzz one target. keep: whether its corpus is replaced by what it has become."""
    outcome = Outcome(target.name, target.about, [each.__name__ for each in target.allowed])
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name)
        known = [*target.seeds(), *corpora.read(corpora.CORPUS, target.name)]
        known += corpora.read(corpora.FINDINGS, target.name)
        for number, data in enumerate(known):
            (folder / f"{number:04d}").write_bytes(data)
        command = [sys.executable, "-m", "tests.fuzz.one", target.name, name, *map(str, (inputs, seconds, seed))]
        said = time.monotonic()
        last: list[str] = []
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # What the user's environment holds does not decide what is reached.
            env={**{each: said for each, said in os.environ.items() if not each.startswith("AIORPC_")}, "TMPDIR": name},
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                last = [*last[-40:], line]
                take(outcome, line)
                if time.monotonic() > said + PAUSE:
                    said = time.monotonic()
                    print(progress(outcome), flush=True)
        if process.returncode and not outcome.finding:
            crash = sorted(path for path in folder.iterdir() if re.match("crash|timeout|oom|slow", path.name))
            outcome.finding = crash[0].read_bytes().hex() if crash else "?"
            outcome.error = f"the process ended with status {process.returncode}"
        if outcome.finding:
            sys.stdout.writelines(last)
        elif keep:
            reached = [path.read_bytes() for path in folder.iterdir() if path.is_file()]
            corpora.write(corpora.CORPUS, target.name, reached, target.about)
    end = f"; FOUND {outcome.error}: {outcome.finding}" if outcome.finding else "; done"
    print(progress(outcome) + end, flush=True)
    return outcome


def take(outcome: Outcome, line: str) -> None:
    """Note what a line of the child says."""
    if line.startswith("{"):
        said: dict[str, Any] = json.loads(line)
        outcome.inputs = said.get("runs", outcome.inputs)
        outcome.accepted = said.get("taken", outcome.accepted)
        outcome.seconds = said.get("seconds", outcome.seconds)
        outcome.memory_mb = said.get("memory", outcome.memory_mb)
        outcome.finding = said.get("finding", outcome.finding)
        outcome.error = said.get("error", outcome.error)
    elif line.startswith("stat::number_of_executed_units:"):
        outcome.inputs = int(line.split()[1])
    elif match := STATUS.match(line):
        outcome.coverage, outcome.corpus = int(match[2]), int(match[4])


def progress(outcome: Outcome) -> str:
    """A line."""
    return (
        f"{outcome.target:11} {outcome.inputs:9,} inputs, {outcome.accepted:,} accepted, {outcome.seconds:.0f} s, "
        f"coverage {outcome.coverage}, corpus {outcome.corpus}, {outcome.memory_mb} MB"
    )


def report(outcome: Outcome, path: Path) -> None:
    """Add to what that file says of a campaign, which may have been run in parts."""
    import torch

    said: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"targets": {}}
    before = said["targets"].get(outcome.target)
    row = asdict(outcome)
    if before is not None:
        for each in ("inputs", "accepted", "seconds"):
            row[each] = round(row[each] + before[each], 1)
        for each in ("coverage", "corpus", "memory_mb"):
            row[each] = max(row[each], before[each])
        row["finding"], row["error"] = row["finding"] or before["finding"], row["error"] or before["error"]
    said["targets"][outcome.target] = row
    rows = list(said["targets"].values())
    said |= {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": {
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "fuzzer": "atheris" if importlib.util.find_spec("atheris") else "without coverage",
        "inputs": sum(each["inputs"] for each in rows),
        "seconds": round(sum(each["seconds"] for each in rows)),
        "findings": sum(bool(each["finding"]) for each in rows),
    }
    path.write_text(json.dumps(said, indent=1, sort_keys=True) + "\n")
    path.with_suffix(".md").write_text(readable(said))


def readable(said: dict[str, Any]) -> str:
    """What a report says, as a document."""
    machine, rows = said["machine"], said["targets"].values()
    heads = ("target", "what is fed", "allowed", "inputs", "accepted", "seconds", "coverage", "corpus", "MB")
    cells = [
        (
            row["target"],
            row["about"],
            ", ".join(row["allowed"]) or "the end of the connection",
            f"{row['inputs']:,}",
            f"{row['accepted']:,}",
            f"{row['seconds']:,.0f}",
            row["coverage"],
            row["corpus"],
            row["memory_mb"],
        )
        for row in rows
    ]
    table = [heads, ["---"] * len(heads), *cells]
    found = [f"- {row['target']}: {row['error']} (`{row['finding']}`)" for row in rows if row["finding"]]
    parts = [
        "# Fuzzing: a campaign",
        f"Written by `python -m tests.fuzz --report`; do not edit it. {said['inputs']:,} inputs in {said['seconds']:,} "
        f"s of fuzzing with {said['fuzzer']}, until {said['date']}; Python {machine['python']}, torch "
        f"{machine['torch']}, {machine['system']}, {machine['cores']} cores.",
        "Every error that is not allowed is a finding; so are a crash, 30 s for one input, 300 MB more than after the "
        "first inputs, and unpickling. *accepted*: inputs without an error; the others were refused by an allowed one. "
        "*coverage*: branches of the code that were seen. *MB*: of the process at the end.",
        "\n".join("| " + " | ".join(map(str, row)) + " |" for row in table),
        "\n".join(found) or "Nothing was found.",
    ]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """See the module; 1 if something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz every target in turn.")
    parser.add_argument("targets", nargs="*", help=f"some of {', '.join(TARGETS)}; all if none is named")
    parser.add_argument("--seconds", type=int, default=0, help="for all together")
    parser.add_argument("--inputs", type=int, default=0, help="for all together, shared out by what each one costs")
    parser.add_argument("--jobs", type=int, default=1, help="targets at once; each takes a core")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the fuzzer; the time if it is not given")
    parser.add_argument("--keep", action="store_true", help="replace the corpora in tests/fuzz/corpus")
    parser.add_argument("--report", type=Path, help="add what came of it to this file, as JSON")
    options = parser.parse_args()
    chosen = [TARGETS[name] for name in options.targets] or list(TARGETS.values())
    if not options.seconds and not options.inputs:
        options.seconds = 60
    began = time.time()
    shares = sum(target.share for target in chosen)
    outcomes: list[Outcome] = []
    seconds = max(1, options.seconds * options.jobs // len(chosen)) if options.seconds else 0

    def one(target: Target) -> Outcome:
        return run(target, -(-options.inputs * target.share // shares), seconds, options.seed, options.keep)

    with ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(one, chosen):
            outcomes.append(outcome)
            if options.report is not None:
                report(outcome, options.report)
    total = sum(each.inputs for each in outcomes)
    found = [each.target for each in outcomes if each.finding]
    print(f"{total:,} inputs in {time.time() - began:.0f} s; found something in: {', '.join(found) or 'none'}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
