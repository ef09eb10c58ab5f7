"""`python -m tests.chaos`: rounds of faults at random moments; `--help` says how."""

from __future__ import annotations

import argparse
import multiprocessing.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .plans import KINDS, make_plan
from .report import Campaign
from .rounds import Verdict, play

STUCK = 20.0  # seconds: how long a phase of a round takes is told from then on


@contextmanager
def own_temporary_directory() -> Iterator[Path]:
    """For this process and its children, whose files then are all that is there; the one that was before."""
    multiprocessing.util.get_temp_dir()  # settled before the move: it is removed when this process ends
    own = tempfile.mkdtemp(prefix="rpc-")  # short: a unix socket's path has 108 bytes
    usual = Path(own).parent
    before, os.environ["TMPDIR"], tempfile.tempdir = os.environ.get("TMPDIR"), own, None
    try:
        yield usual
    finally:
        os.environ.pop("TMPDIR")
        tempfile.tempdir = None
        if before is not None:
            os.environ["TMPDIR"] = before
        shutil.rmtree(own, ignore_errors=True)


def tell(verdict: Verdict, again: str) -> None:
    """A round, on the terminal."""
    failed = ", ".join(f"{count} {error}" for error, count in verdict.failed.items()) or "none"
    slow = f"; until when: {verdict.phases}" if verdict.seconds > STUCK else ""
    print(f"    {verdict.seconds:.1f} s, {verdict.operations} operations, failed: {failed}{slow}", flush=True)
    if verdict.wrong:
        lines = [*(f"WRONG: {each}" for each in verdict.wrong), f"logs: {verdict.folder}", f"again: {again}"]
        print("\n".join(f"    {each}" for each in lines), flush=True)


def main() -> int:
    """See the module; 1 if something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Groups under faults, round by round.")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of all rounds; the time if it is not given")
    parser.add_argument("--rounds", type=int, default=100, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    kinds = "; ".join(f"{name}: {what}" for name, what in KINDS.items())
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=[], help=f"of faults, all by default: {kinds}")
    parser.add_argument("--report", type=Path, help="a file for what came of it, as JSON; a document beside it")
    options = parser.parse_args()
    chosen = [name for name in KINDS if name in options.kinds or not options.kinds]
    campaign = Campaign(options.seed, chosen)
    with own_temporary_directory() as usual:
        for number in range(options.first, options.first + options.rounds):
            plan = make_plan(options.seed, number, chosen)
            print(f"{number}: {plan}", flush=True)
            verdict = play(plan, usual)
            tell(verdict, campaign.again(verdict))
            campaign.add(verdict)
            if options.report is not None:
                campaign.write(options.report)
    print(campaign.summary)
    return int(bool(campaign.found))


if __name__ == "__main__":
    sys.exit(main())
