"""``python -m tests.conformance``: run PyTorch's RPC tests on aiorpc and compare with the table. See README.md."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from . import suites, table
from .processes import FAIL, PASS, Outcome, Runner
from .suites import Case
from .table import Changes, Table

AIORPC = "aiorpc.compat.torch:install"
LOGS = Path("build/conformance")


def main(arguments: list[str] | None = None) -> int:
    """Run; 1 if a test fails that passed before, or that the table does not know."""
    options = _parse(arguments)
    scratch = _prepare()
    try:
        suites.load(options.install)
        return _run(options, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("-k", metavar="REGEX", default="", help="only tests whose Class.test matches")
    parser.add_argument("--tests", type=Path, metavar="FILE", help="only tests named there, one Class.test per line")
    parser.add_argument("--kinds", default="", help="only tests of these kinds, as CORE,INTERNAL")
    parser.add_argument("--list", action="store_true", help="list them, run nothing")
    parser.add_argument("--update", action="store_true", help="write what happens into the table")
    parser.add_argument("--jobs", type=int, default=min(4, 2 * (os.cpu_count() or 1)), help="tests at a time")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one test")
    parser.add_argument("--start", choices=["fork", "spawn"], help="of ranks; spawn where there are GPUs")
    parser.add_argument("--install", default=AIORPC, metavar="MODULE:FUNCTION", help="'' for torch's own RPC")
    parser.add_argument("--logs", type=Path, default=LOGS, help="directory for what tests print")
    parser.add_argument("--outcomes", type=Path, metavar="FILE", help="write each outcome there as a line of JSON")
    return parser.parse_args(arguments)


def _prepare() -> Path:
    """Settings that have to be there before torch is imported; and a directory for temporary files of tests."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # no pool of threads: this process is forked
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # devices are counted without starting the driver here
    scratch = tempfile.mkdtemp(prefix="conf-")
    os.environ["TMPDIR"] = tempfile.tempdir = scratch
    return Path(scratch)


def _run(options: argparse.Namespace, scratch: Path) -> int:
    import torch

    gpus = torch.cuda.device_count()
    known = table.read()
    existing = {case.id: case for case in suites.cases()}
    chosen = [case for case in existing.values() if _is_chosen(case, options, known, gpus)]
    if options.list:
        print("\n".join(case.id for case in chosen))
        return 0
    start = options.start or ("spawn" if gpus else "fork")
    if start == "fork" and (threads := len(os.listdir("/proc/self/task"))) > 1:
        print(f"{threads} threads run in the process that is forked: tests may hang; --start spawn is safe")
    runner = Runner(options.logs.absolute(), scratch, options.timeout, start)
    print(f"{len(chosen)} tests of torch {torch.__version__}, {options.jobs} at a time, {gpus} GPUs; ", end="")
    print(f"the table is about torch {known.torch or '(none)'}; on {options.install or 'torch itself'}", flush=True)
    began = time.monotonic()
    outcomes = _follow(runner, chosen, options, known)
    print(f"{time.monotonic() - began:.0f} s: {_count(outcomes)}")
    changes = table.compare(known, outcomes, existing, gpus)
    _tell(changes, known, options.logs)
    if options.update:
        _update(table.update(known, outcomes, existing, torch.__version__, gpus))
        return 0
    return 0 if changes.ok else 1


def _is_chosen(case: Case, options: argparse.Namespace, known: Table, gpus: int) -> bool:
    row = known.rows.get(case.id)
    if options.tests is not None and case.id not in options.tests.read_text().split():
        return False
    if options.kinds and (row is None or row.kind not in options.kinds.split(",")):
        return False
    return re.search(options.k, case.id) is not None and (row is None or row.gpus <= gpus)


def _follow(runner: Runner, chosen: list[Case], options: argparse.Namespace, known: Table) -> list[Outcome]:
    """Run them and print each outcome as it comes."""
    outcomes: list[Outcome] = []
    lines = options.outcomes.open("w") if options.outcomes else None
    for outcome in runner.run_twice(chosen, options.jobs, _worth_a_second_look(known, options.update)):
        outcomes.append(outcome)
        why = f" :: {outcome.summary}" if outcome.result == FAIL else ""
        count = f"{len(outcomes):{len(str(len(chosen)))}d}/{len(chosen)}"
        print(f"{count} {outcome.result} {outcome.seconds:6.2f} s {outcome.id}{why}", flush=True)
        if lines is not None:
            print(json.dumps(outcome._asdict()), file=lines, flush=True)
    if lines is not None:
        lines.close()
    return outcomes


def _worth_a_second_look(known: Table, update: bool) -> Callable[[Outcome], bool]:
    """A failure that is no news is not looked at again."""

    def retry(outcome: Outcome) -> bool:
        row = known.rows.get(outcome.id)
        return update or row is None or row.result == PASS

    return retry


def _count(outcomes: list[Outcome]) -> str:
    counts = Counter(outcome.result for outcome in outcomes)
    return ", ".join(f"{count} {result}" for result, count in sorted(counts.items()))


def _tell(changes: Changes, known: Table, logs: Path) -> None:
    titles = {
        "lost": "passed before and fail now",
        "broken": "are not in the table and fail",
        "gained": "did not pass before and pass now (--update)",
        "flaky": "failed, as they do with torch's own RPC now and then",
    }
    for field, title in titles.items():
        outcomes: list[Outcome] = getattr(changes, field)
        if outcomes:
            print(f"{len(outcomes)} {title}:")
        for outcome in outcomes:
            print(f"  {outcome.id}: {outcome.result} {outcome.summary}\n    {logs / outcome.id}.log")
    if changes.gone:
        print(f"{len(changes.gone)} are in the table (torch {known.torch}) and not in this torch {version('torch')}")


def _update(changed: Table) -> None:
    table.write(changed)
    table.README.write_text(table.with_summary(table.README.read_text(), changed))
    print(f"written: {table.RESULTS}, {table.README}\n\n{table.summary(changed)}")


if __name__ == "__main__":
    sys.exit(main())
