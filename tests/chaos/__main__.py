"""`python -m tests.chaos`: rounds of faults at random moments; `--help` says how."""

from __future__ import annotations

import argparse
import json
import multiprocessing.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.network.hosts import linked

from .load import OPERATIONS
from .plans import KINDS, make_plan
from .report import Campaign
from .rounds import Verdict, play

STUCK = 20.0  # seconds: how long the phases of a round take is told from then on
ROOT = Path(__file__).parents[2]


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
    lines = [
        f"{verdict.plan.number}: {verdict.plan}",
        f"    {verdict.seconds:.1f} s, {verdict.operations} operations, failed: {failed}{slow}",
    ]
    if verdict.wrong:
        lines += [f"    WRONG: {each}" for each in verdict.wrong]
        lines += [f"    logs: {verdict.folder}", f"    again: {again}"]
    print("\n".join(lines), flush=True)


def main() -> int:
    """See the module; 1 if something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Groups under faults, round by round.")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of all rounds; the time if it is not given")
    parser.add_argument("--rounds", type=int, default=100, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    kinds = "; ".join(f"{name}: {what}" for name, what in KINDS.items())
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=[], help=f"of faults, all by default: {kinds}")
    parser.add_argument("--load", nargs="*", choices=OPERATIONS, default=[], help="of operations, all by default")
    parser.add_argument("--jobs", type=int, default=1, help="rounds at once")
    parser.add_argument("--minutes", type=float, default=0, help="after which no round begins; 0: no limit")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)  # of a campaign: where to say what came of it
    parser.add_argument("--report", type=Path, help="a file for what came of it, as JSON; a document beside it")
    options = parser.parse_args()
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # of the members' stores, which tell of each connection that ends
    options.kinds = possible(options.kinds or list(KINDS))
    options.load = options.load or list(OPERATIONS)
    chosen = ["--kinds", *options.kinds] if options.kinds != list(KINDS) else []
    chosen += ["--load", *options.load] if options.load != list(OPERATIONS) else []
    campaign = Campaign(options.seed)
    began = time.monotonic()
    with own_temporary_directory() as usual:
        if options.jobs > 1:
            play_at_once(campaign, options, chosen, usual)
        else:
            play_all(campaign, options, chosen, usual)
    print(campaign.summary)
    if options.report is not None:
        campaign.write(options.report, time.monotonic() - began)
    return int(bool(campaign.found))


def possible(kinds: list[str]) -> list[str]:
    """Those of the kinds that this machine allows."""
    if "line" in kinds:
        try:
            with linked("relay"):
                return kinds
        except pytest.skip.Exception as reason:
            print(f"without network namespaces, as {reason}", flush=True)
    return [name for name in kinds if name != "line"]


def play_all(campaign: Campaign, options: argparse.Namespace, chosen: Sequence[str], usual: Path) -> None:
    """One round after the other."""
    began = time.monotonic()
    for number in range(options.first, options.first + options.rounds):
        if options.minutes and time.monotonic() > began + 60 * options.minutes:
            break
        verdict = play(make_plan(options.seed, number, options.kinds, options.load), usual)
        again = " ".join(command(options.seed, number, 1, chosen))
        tell(verdict, again)
        campaign.add(verdict, again)
        if options.part is not None:
            options.part.write_text(json.dumps(campaign.told()))


def play_at_once(campaign: Campaign, options: argparse.Namespace, chosen: Sequence[str], usual: Path) -> None:
    """So many processes play a part of the rounds each."""
    share = -(-options.rounds // options.jobs)
    firsts = range(options.first, options.first + options.rounds, share)
    with ThreadPoolExecutor(options.jobs) as threads:

        def one(first: int) -> Path:
            part = Path(tempfile.gettempdir()) / f"{first}.json"
            rounds = min(share, options.first + options.rounds - first)
            arguments = [*command(options.seed, first, rounds, chosen)[1:], "--minutes", str(options.minutes)]
            arguments += ["--part", str(part)]
            subprocess.run(
                [sys.executable, *arguments], cwd=ROOT, env={**os.environ, "TMPDIR": str(usual)}, check=False
            )
            return part

        for part in threads.map(one, firsts):
            if part.exists():
                campaign.merge(json.loads(part.read_text()))


def command(seed: int, first: int, rounds: int, chosen: Sequence[str]) -> list[str]:
    """What plays these rounds."""
    numbers = ["--seed", str(seed), "--first", str(first), "--rounds", str(rounds)]
    return ["python", "-m", "tests.chaos", *numbers, *chosen]


if __name__ == "__main__":
    sys.exit(main())
