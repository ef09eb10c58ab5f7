"""The runtime's own handlers: the callers of each, its subject, and its bounds.

They also serve members with no other rights (the option ``allow``). Their annotations declare their arguments
(`calls.declared`). Tests compare this list with the marked handlers, and with the table in SECURITY.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

EVERY_MEMBER = "every member"
THE_LEADER = "the leader of the group"
RUNS_THE_PASS = "the worker that runs the pass"
HAS_A_PART = "members with the context"
MAY_CALL_IT = "members whose role may call the method"
MAY_LOOK = "members whose role may call it by that name"
READERS = "members whose role may read the name"
DROP_IN = "every member; with the drop-in alone"
LEADS_IT = "who leads that gathering; with the drop-in alone"

OWN_CALLS = "its own calls of the runtime: `max_queued_calls`, `max_call_rate`"
CALLS = "its calls: `max_queued_calls`, `max_call_rate`"
GATHERINGS = f"{CALLS}; of gatherings not begun here 256, and `max_queued_bytes`"
RECORDINGS = f"{OWN_CALLS}; 4 recordings in all, 200,000 events each, an hour long"
WAITS = "waits at a queue: `max_queued_calls`"


class OwnHandler(NamedTuple):
    """One handler. callers: its callers. about: the subject of a call. bound: its limits, beside the bytes of its
    arguments (`max_queued_bytes`)."""

    name: str
    callers: str
    about: str
    bound: str = OWN_CALLS


_GROUP = "aiorpc.runtime.group.group"
_PUBLISHED = "aiorpc.runtime.publication.handlers"
_PARTS = "aiorpc.autograd.parts"
_CONTEXTS = "aiorpc.autograd.contexts"
_RECORDING = "aiorpc.observability.recording"
_QUEUE = "aiorpc.queues.served:ServedQueue"
_TORCH = "aiorpc.compat.torch.rpc"
_ASKED = "aiorpc.observability.asked"

#: All of them, by module.
HANDLERS: Sequence[OwnHandler] = (
    OwnHandler(f"{_GROUP}:attend", EVERY_MEMBER, "itself, as it has shown itself when it connected"),
    OwnHandler(f"{_GROUP}:arrive", "a joining member that this worker has let in", "itself"),
    OwnHandler(f"{_GROUP}:introduce", THE_LEADER, "a joining member, once the member before it is gone"),
    OwnHandler(f"{_GROUP}:report_lost", EVERY_MEMBER, "another member, which is asked before it is believed"),
    OwnHandler(f"{_GROUP}:vouch", EVERY_MEMBER, "any member: whether this worker has parted with it"),
    OwnHandler(f"{_GROUP}:present", EVERY_MEMBER, "nobody"),
    OwnHandler(f"{_GROUP}:enter", EVERY_MEMBER, "itself"),
    OwnHandler(f"{_GROUP}:poll", EVERY_MEMBER, "nobody"),
    OwnHandler("aiorpc.runtime.group.resumption:rest", EVERY_MEMBER, "its own connection to here"),
    OwnHandler(f"{_PUBLISHED}:leased", EVERY_MEMBER, "a name, as a reason to look in the store who publishes it"),
    OwnHandler(f"{_PUBLISHED}:leave", EVERY_MEMBER, "itself: whether it may publish a name"),
    OwnHandler(f"{_PUBLISHED}:unpublished", EVERY_MEMBER, "itself, as the publisher of a name"),
    OwnHandler(f"{_PUBLISHED}:wanted", READERS, "its own subscriptions"),
    OwnHandler(f"{_PUBLISHED}:pieced", READERS, "its own subscriptions"),
    OwnHandler(f"{_PUBLISHED}:digest", READERS, "a version that this worker has published"),
    OwnHandler(f"{_PUBLISHED}:arrived", EVERY_MEMBER, "its own subscriptions"),
    OwnHandler(f"{_PUBLISHED}:fetching", EVERY_MEMBER, "its own subscriptions"),
    OwnHandler(f"{_PUBLISHED}:latest", "members whose role may read or publish the name", "a published name"),
    OwnHandler(f"{_PUBLISHED}:released", EVERY_MEMBER, "its own subscriptions"),
    OwnHandler(f"{_PUBLISHED}:ended", EVERY_MEMBER, "its own subscriptions"),
    OwnHandler(
        "aiorpc.runtime.fanout.barriers:come_to_barrier",
        "members of the barrier",
        "itself",
        f"{OWN_CALLS}; 256 barriers at a time",
    ),
    OwnHandler(f"{_RECORDING}:clock", MAY_LOOK, "nobody"),
    OwnHandler(f"{_RECORDING}:begin", MAY_LOOK, "all calls of this worker, without arguments and results", RECORDINGS),
    OwnHandler(f"{_RECORDING}:end", MAY_LOOK, "its own recordings"),
    OwnHandler(f"{_RECORDING}:piece", MAY_LOOK, "its own recordings"),
    OwnHandler(f"{_RECORDING}:drop", MAY_LOOK, "its own recordings"),
    OwnHandler("aiorpc.queues.packing:hand_over", "who has got the item, which has a key", "that item"),
    OwnHandler(f"{_QUEUE}.put_items", MAY_CALL_IT, "its own items", WAITS),
    OwnHandler(f"{_QUEUE}.take_items", MAY_CALL_IT, "its own items", WAITS),
    OwnHandler(f"{_QUEUE}.return_items", "members that may take items", "items that it has taken"),
    OwnHandler(f"{_QUEUE}.withdraw", "members that may put or take items", "its own calls", CALLS),
    OwnHandler(f"{_QUEUE}.finish_items", "members that may take items", "items of the queue"),
    OwnHandler(f"{_QUEUE}.join_items", MAY_CALL_IT, "nobody", WAITS),
    OwnHandler(f"{_QUEUE}.qsize", MAY_CALL_IT, "nobody", CALLS),
    OwnHandler(f"{_QUEUE}.empty", MAY_CALL_IT, "nobody", CALLS),
    OwnHandler(f"{_QUEUE}.full", MAY_CALL_IT, "nobody", CALLS),
    OwnHandler(f"{_QUEUE}.shut_down", MAY_CALL_IT, "the queue", CALLS),
    OwnHandler(f"{_PARTS}:gather", HAS_A_PART, "a context", CALLS),
    OwnHandler(f"{_PARTS}:plan", RUNS_THE_PASS, "its own pass", CALLS),
    OwnHandler(f"{_PARTS}:go_on", RUNS_THE_PASS, "its own pass", CALLS),
    OwnHandler(f"{_PARTS}:take", HAS_A_PART, "gradients of a pass", CALLS),
    OwnHandler(f"{_PARTS}:abort", RUNS_THE_PASS, "its own pass", CALLS),
    OwnHandler(f"{_CONTEXTS}:forget", EVERY_MEMBER, "its own contexts; of others' their openers are asked", CALLS),
    OwnHandler(f"{_CONTEXTS}:has_ended", EVERY_MEMBER, "contexts of this worker", CALLS),
    OwnHandler(f"{_ASKED}:report", MAY_LOOK, "this worker"),
    OwnHandler(f"{_ASKED}:stacks", MAY_LOOK, "the process of this worker"),
    OwnHandler(f"{_TORCH}.api:_gather_to_leader", DROP_IN, "itself, in a gathering that this worker leads", GATHERINGS),
    OwnHandler(f"{_TORCH}.api:_broadcast_to_followers", LEADS_IT, "a gathering of this worker", GATHERINGS),
    OwnHandler(f"{_TORCH}.api:_nobody_waits", DROP_IN, "another member, which is asked before it is believed", CALLS),
    OwnHandler(f"{_TORCH}.rref:backward_on_owner", "who has a reference to the value", "that value", CALLS),
)


def as_table() -> str:
    """The rows of the table in SECURITY.md, as Markdown."""
    rows = [
        "| handler | who may call it | about whom, or what | what bounds it, for each member |",
        "| --- | --- | --- | --- |",
    ]
    for name, callers, about, bound in HANDLERS:
        rows.append(f"| `{name.removeprefix('aiorpc.')}` | {callers} | {about} | {bound} |")
    return "\n".join(rows)
