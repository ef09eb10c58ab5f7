"""Reports as workers make them, for functions of reports."""

from __future__ import annotations

from aiorpc.observability.reader import SeenGroup
from aiorpc.observability.report import SeenCall, SeenMember, WorkerReport


def made(caller: str, worker: str, call_id: int, parent: tuple[str, int] | None = None, since: float = 3.0) -> SeenCall:
    """A call as its caller sees it."""
    return SeenCall("made", caller, worker, call_id, f"f{call_id}", state="sent", since=since, parent=parent)


def served(
    caller: str, worker: str, call_id: int, *lines: str, at_lock: bool = False, state: str = "running"
) -> SeenCall:
    """The same at its worker."""
    call = SeenCall("served", caller, worker, call_id, f"f{call_id}", state=state, since=3.0)
    call.stands_at, call.at_lock = list(lines), at_lock
    return call


def group(*calls: SeenCall, lost: tuple[str, ...] = ()) -> SeenGroup:
    """A group whose workers have these calls under way. lost: members that all others have lost."""
    names = sorted({each.caller for each in calls} | {each.worker for each in calls} - {*lost})
    members = [SeenMember(name, mark=name, state="ready") for name in names]
    members += [SeenMember(name, state="lost") for name in lost]
    return SeenGroup(
        [
            WorkerReport(
                name,
                mark=name,
                members=members,
                calls=[each for each in calls if name == (each.caller if each.side == "made" else each.worker)],
            )
            for name in names
        ]
    )


def ring(*names: str, at_lock: bool = True) -> list[SeenCall]:
    """Each worker's handler holds a lock and has called the next worker, whose handler wants that worker's lock."""
    calls: list[SeenCall] = []
    for number, name in enumerate(names):
        after = names[(number + 1) % len(names)]
        calls.append(made("driver", name, number + 1))
        calls.append(served("driver", name, number + 1, "job.py:5 in hold"))
        calls.append(made(name, after, 100 + number, ("driver", number + 1)))
        calls.append(served(name, after, 100 + number, "job.py:9 in take", at_lock=at_lock))
    return calls
