"""Say whether a worker on this host lives, or with --ready whether it takes calls: for Kubernetes and systemd.

The exit status is 0 if it does, and 1 otherwise, also if there is no such worker. It asks nobody: it reads the
heartbeat that the worker's loop leaves in memory, so the answer also comes while the process stands still.
"""

from __future__ import annotations

import argparse
import os

from ..observability import heartbeat
from ..observability.heartbeat import LATE, READY_WITHIN, STUCK_AFTER, Heart, Verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("name", metavar="NAME", help="the worker")
    parser.add_argument("--ready", action="store_true", help="whether it takes calls, not whether it lives")
    parser.add_argument(
        "--stuck-after",
        metavar="SECONDS",
        type=_seconds,
        help=f"for which its loop may stand still ({STUCK_AFTER:g}; with --ready {READY_WITHIN:g})",
    )
    parser.add_argument("--pid", type=int, help="its process, where several have a worker of that name")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not LATE <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"a loop can be told to be stuck after {LATE:g} s or more, not {text}")
    return seconds


def run(options: argparse.Namespace) -> int:
    """Print the answer. Returns 1 if the worker does not live, or is not ready."""
    stuck_after = options.stuck_after or (READY_WITHIN if options.ready else STUCK_AFTER)
    verdict = probe(options.name, options.pid, ready=options.ready, stuck_after=stuck_after)
    if options.json:
        import json

        print(json.dumps(vars(verdict)))
    else:
        print(verdict.text)
    return 0 if verdict.ok else 1


def probe(name: str, pid: int | None, *, ready: bool, stuck_after: float) -> Verdict:
    """What there is to say of the worker of that name. pid: of its process; None for any."""
    folders = heartbeat.directories(temporary_folder())
    found = heartbeat.hearts(folders)
    if not any(heart.name == name for heart in found):
        import tempfile

        # Where the disk was full, the worker has made its directory in another place.
        more = [each for each in heartbeat.directories(tempfile.gettempdir()) if each not in folders]
        folders, found = folders + more, found + heartbeat.hearts(more)
    meant = [heart for heart in found if heart.name == name and pid in (None, heart.pid)]
    verdicts = [heartbeat.judge(heart, ready=ready, stuck_after=stuck_after) for heart in meant]
    verdicts = [each for each in verdicts if each.state != "ended"] or verdicts[-1:]
    if not verdicts:
        return _unknown(name, pid, folders, found)
    pids = sorted({heart.pid for heart in meant if any(each.pid == heart.pid for each in verdicts)})
    if len(pids) > 1:
        text = f"processes {', '.join(map(str, pids))} have a worker {name!r}: add --pid to say which"
        return Verdict(name, None, "ambiguous", text)
    return min(verdicts, key=lambda each: each.ok)  # of groups that share a process, the worker that fares worse


def _unknown(name: str, pid: int | None, folders: list[str], found: list[Heart]) -> Verdict:
    """There is no such worker: where it was looked for, and which there are."""
    names = sorted({heart.name for heart in found if heartbeat.how_it_stands(heart.pid) != "gone"})
    there = f"there are {', '.join(names)}" if names else "there is no worker at all"
    where = ", ".join(folders) or f"{temporary_folder()}/aiorpc-{os.getuid()}"
    process = "" if pid is None else f" in process {pid}"
    text = (
        f"user {os.getuid()} has no worker {name!r}{process} on this host; {there} (looked into {where}; user and "
        "TMPDIR must be the worker's)"
    )
    return Verdict(name, pid, "unknown", text)


def temporary_folder() -> str:
    """As `tempfile.gettempdir`, which takes a tenth of the time of a probe, and looks elsewhere if the disk is full."""
    folder = next(filter(None, map(os.environ.get, ("TMPDIR", "TEMP", "TMP"))), "/tmp")
    if os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
        return os.path.abspath(folder)
    import tempfile

    return tempfile.gettempdir()
