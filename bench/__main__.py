"""``python -m bench``: measure, print the table, write JSON and pictures."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from . import counting, gpu, merge, messages, picture, report, suite
from .stage import Plan
from .stats import BenchError, Outcome

DEFAULT_OUT = Path(__file__).parent / "results" / "bench"


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    options.add_argument("--quick", action="store_true", help="fewer and shorter rounds, under four minutes in all")
    options.add_argument("--only", metavar="NAME,...", help="take these measurements only")
    options.add_argument("--rounds", type=int, metavar="N", help="rounds of each pair")
    options.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, help="files to write, without .json, .png and -sizes.png"
    )
    options.add_argument(
        "--list",
        nargs="?",
        const="",
        metavar="OPERATION",
        help="list the measurements; with --only functions, the Python functions of an operation: "
        + ", ".join(each.name for each in counting.OPERATIONS),
    )
    options.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")
    options.add_argument("--null", action="store_true", help="torch against itself, to see the noise")
    options.add_argument(
        "--merge", metavar="JSON", type=Path, nargs="+", help="measure nothing: the table of figures from these results"
    )
    options.add_argument("--gpu", action="store_true", help="tensors on a GPU instead, into results/<its name>")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 when a measurement failed (or, with ``--check``, a target was missed), 2 for misuse.

    With ``--gpu`` also 2 where there is no GPU.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    if options.list == "":
        print("\n".join(f"{each.name:16} {each.summary}" for each in suite.MEASUREMENTS))
        return 0
    if options.list:
        return _list_functions(options)
    if options.merge:
        return _merge(options.merge, alone=len(given) == 1 + len(options.merge))
    if options.gpu:
        return _gpu(options, given)
    try:
        chosen = suite.choose(options.only.split(",") if options.only else None)
    except ValueError as error:
        parser().error(str(error))
    outcome = suite.run(chosen, _plan(options), given, null=options.null)
    report.show(outcome)
    _write(outcome, options.out)
    missed = options.check and any(row.passed is False for row in outcome.rows)
    return 1 if outcome.failures or missed else 0


def _list_functions(options: argparse.Namespace) -> int:
    if options.only != "functions":
        parser().error("--list takes an operation with --only functions alone")
    try:
        operation = counting.choose(options.list)
    except ValueError as error:
        parser().error(str(error))
    print(counting.listing(operation, _plan(options)))
    if operation.name in messages.STEPS:
        print(messages.listing(operation, _plan(options)))
    return 0


def _merge(paths: Sequence[Path], *, alone: bool) -> int:
    if not alone:
        parser().error("--merge takes results and no other option, as it measures nothing")
    try:
        print(merge.markdown([_read(path) for path in paths]))
    except BenchError as error:
        parser().error(str(error))
    return 0


def _read(path: Path) -> Outcome:
    try:
        return report.read_json(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path} is no result of a run: {error!r}") from error


def _gpu(options: argparse.Namespace, given: Sequence[str]) -> int:
    if options.only or options.null or options.check:
        parser().error("--gpu has one measurement without targets, which blocks: no --only, --null, --check")
    out = None if options.out == DEFAULT_OUT else options.out
    return gpu.main(_plan(options), given, out)


def _plan(options: argparse.Namespace) -> Plan:
    plan = Plan.quick() if options.quick else Plan()
    if options.rounds is None:
        return plan
    rounds = max(1, options.rounds)
    fewer = {name: min(rounds, getattr(plan, name)) for name in ("cohort_rounds", "tcp_rounds")}
    asked = {name: rounds for name in ("rounds", "large_rounds", "first_rounds", "program_rounds")}
    return replace(plan, limit=math.inf, **asked, **fewer)


def _write(outcome: Outcome, out: Path) -> None:
    report.write_json(outcome, out.with_suffix(".json"))
    print(f"wrote {out.with_suffix('.json')}")
    try:
        drawn = [out.with_suffix(".png"), out.with_name(f"{out.stem}-sizes.png")]
        picture.draw(outcome, drawn[0])
        if not picture.draw_sizes(outcome, drawn[1]):
            drawn.pop()
    except ImportError as error:
        print(f"no picture: {error}", file=sys.stderr)
    else:
        print("\n".join(f"wrote {each}" for each in drawn))


if __name__ == "__main__":
    sys.exit(main())
