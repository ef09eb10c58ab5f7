"""What has to hold of the operations of a round, whatever happened meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from .load import GIVEN_UP, Outcome

LOOKED_AT = (
    "every operation ends, with its value or an error that names who was killed (by name and pid) or has left;",
    "values are right: of calls, nested and blocking ones too, streams, references, gradients, large tensors, batches;",
    "a call that returned has run once, one of which nothing was sent never, and none has run twice in one process;",
    "afterwards each living member reaches each other one by its name, newcomers in the places of the dead included;",
    "nothing is left in the workers: no call, no reference, no shared memory, no job, no blocked thread;",
    "they leave in bounded time, and have lost those who were killed and nobody else;",
    "no descriptor, thread, task or child is left in their processes, and no file of the dead.",
)


def judge(
    outcome: Outcome,
    killed: Mapping[int, str],
    left: Mapping[int, str],
    store_died: bool = False,
    missed: Collection[str] = (),
) -> str:
    """What is wrong with an error; empty if it is one that has to be expected.

    killed, left: names by process id. store_died: whether the store of a free group was in a killed process. missed:
    names of members of a free group that are gone, and that others may never have met.
    A wait ends with its value, or because a process was killed or has left: the error names that one, and nobody else.
    Of who was killed it says that it was lost, and of who has left that. Without the store of a free group nobody can
    say where a member is that one has not heard of; and who has not met a member there before it was gone does not hear
    of it: it has never been there, or has not joined yet (of a reference, which needs to know whom).
    """
    if not outcome.error:
        return ""
    if outcome.error == "PeerLost" and outcome.worker == killed.get(outcome.pid):
        return ""
    if outcome.error in ("PeerLeft", "WorkerClosed") and any(name in outcome.text for name in left.values()):
        return ""
    unknown = [text for name in missed for text in (f"no worker {name!r} that", f"worker {name!r} has not joined yet")]
    if outcome.error == "UnknownWorker" and any(text in outcome.text for text in unknown):
        return ""
    if outcome.error in ("RendezvousError", "StoreGone") and store_died and "Nothing was sent" in outcome.text:
        return ""
    return f"operation {outcome.number} ({outcome.kind} to {outcome.to}) ended with {outcome.error}: {outcome.text}"


def miscounted(outcomes: Sequence[Outcome], runs: Mapping[tuple[int, int], int]) -> Iterator[str]:
    """Operations that ran too often, or not at all. runs: how often each one did in each process."""
    made = {outcome.number: outcome for outcome in outcomes}
    totals: Counter[int] = Counter()
    for (number, pid), count in runs.items():
        totals[number] += count
        if count > 1:
            yield f"operation {number} ran {count} times in process {pid}: {made.get(number, 'of a caller who died')}"
    for number, outcome in made.items():
        total = totals[number]
        least = 0 if outcome.error or outcome.kind in GIVEN_UP else 1
        most = 0 if outcome.unsent else total if outcome.retried else 1
        if not least <= total <= most:
            yield f"operation {number} ran {total} times: {outcome}"
