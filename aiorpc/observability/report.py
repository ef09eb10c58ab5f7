"""What one sees of a worker from outside: its state, members, calls, queues, published values and figures.

`making` makes the report of a worker, and commands and the page read it, as MessagePack. All fields have defaults, and
unknown ones are ignored: both ends may be of different versions. Times are seconds before the report was made, unless a
field says otherwise; sizes are bytes. Imports no torch.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Side = Literal["made", "served"]


class SeenCall(msgspec.Struct, omit_defaults=True):
    """A call under way at a worker.

    side: "made" here or "served" here. caller, worker: the names of both ends. call_id: its number among the calls from
    that caller to that worker. state: of a call made here "connecting" or "sent"; of one served here "queued" or
    "running". since: how long it has been under way. left: seconds until its deadline; None for no limit. made_at: the
    line of the program that made it. stands_at: the line at which its handler stands now, and its callers, innermost
    first. parent: of a call made by a handler, the caller and the number of the call that this handler serves. part_of:
    as in `aiorpc.events.CallEvent`. own: whether the runtime makes it. at_lock: whether its handler stands at a lock or
    a semaphore that it does not get.
    """

    side: Side = "made"
    caller: str = ""
    worker: str = ""
    call_id: int = 0
    function: str = ""
    kind: str = "call"
    state: str = ""
    since: float = 0.0
    left: float | None = None
    made_at: str = ""
    stands_at: list[str] = []
    parent: tuple[str, int] | None = None
    part_of: tuple[str, int | str] | None = None
    own: bool = False
    at_lock: bool = False


class SeenMember(msgspec.Struct, omit_defaults=True):
    """Another member, or this one, as a worker sees it. state: of the connection for calls to it, or "lost". mark:
    of this life of the worker, no other has it. unsent: bytes that wait for it to read. sent, received: bytes on
    sockets; apart_sent, apart_received: of tensors on other ways, such as shared memory. All four begin with the
    connection."""

    name: str = ""
    id: int = 0
    role: str = ""
    hostname: str = ""
    pid: int = 0
    state: str = ""
    mark: str = ""
    sent: int = 0
    received: int = 0
    unsent: int = 0
    apart_sent: int = 0
    apart_received: int = 0


class SeenFunction(msgspec.Struct, omit_defaults=True):
    """Calls of a function by this worker to `peer` ("made") or by `peer` to this one ("served"), since counting began.

    ended: how many ended, failed: of these without a value, seconds: their durations together. buckets: how many took
    at most each of `WorkerReport.bounds`, and longer; each call is in one of them.
    """

    side: Side = "made"
    function: str = ""
    peer: str = ""
    ended: int = 0
    failed: int = 0
    seconds: float = 0.0
    buckets: list[int] = []


class SeenQueue(msgspec.Struct, omit_defaults=True):
    """A queue that the worker owns. getters, putters: calls that wait. unfinished: items without `task_done`. untaken:
    since when there are items of which none was taken; 0.0 for an empty queue."""

    name: str = ""
    length: int = 0
    maxsize: int = 0
    getters: int = 0
    putters: int = 0
    unfinished: int = 0
    untaken: float = 0.0


class SeenReader(msgspec.Struct, omit_defaults=True):
    """A reader of a published name. version: the newest that it has; behind: newer ones that it does not have; lacking:
    since when there are newer ones and none has come to it, 0.0 if it has the newest."""

    worker: str = ""
    version: int = 0
    behind: int = 0
    lacking: float = 0.0


class SeenName(msgspec.Struct, omit_defaults=True):
    """A name that the worker publishes. version: the newest. age: since it was published."""

    name: str = ""
    version: int = 0
    age: float = 0.0
    readers: list[SeenReader] = []


class SeenSubscription(msgspec.Struct, omit_defaults=True):
    """A name that the worker reads. version: the newest that it has, 0 for none; age: since that came."""

    name: str = ""
    version: int = 0
    age: float = 0.0


class SeenEvent(msgspec.Struct, omit_defaults=True):
    """News of the group. time: seconds since the epoch. what: the name of the event's type, as in `aiorpc.events`."""

    time: float = 0.0
    what: str = ""
    worker: str = ""
    text: str = ""


class SeenLoop(msgspec.Struct, omit_defaults=True):
    """The worker's event loop. silent: since when its timer is overdue, 0.0 if it is not. stands_at: where its thread
    stands, innermost line first; only while it is silent."""

    silent: float = 0.0
    lag_mean: float = 0.0
    lag_max: float = 0.0
    stands_at: list[str] = []


class WorkerReport(msgspec.Struct, omit_defaults=True):
    """One worker at one moment.

    mark: of this life of the worker, as in the members' reports. statistics: the numbers of
    `aiorpc.types.Statistics`. traffic: bytes and buffers by channel, "name.sent" and so on. metrics: where Prometheus
    finds it, empty for nowhere. made: seconds since the epoch. memory: bytes of its process that lie in memory. tally:
    calls by function and other worker, if `Look.tally` asked for it; bounds: of its buckets, in seconds. log: the last
    lines of the log ``aiorpc`` of its process, oldest first, if `Look.log` asked for them.
    """

    name: str = ""
    id: int = 0
    role: str = ""
    mark: str = ""
    init_method: str = ""
    dynamic: bool = False
    state: str = ""
    pid: int = 0
    hostname: str = ""
    version: str = ""
    made: float = 0.0
    uptime: float = 0.0
    metrics: str = ""
    memory: int = 0
    statistics: dict[str, float] = {}
    traffic: dict[str, int] = {}
    loop: SeenLoop = msgspec.field(default_factory=SeenLoop)
    members: list[SeenMember] = []
    calls: list[SeenCall] = []
    queues: list[SeenQueue] = []
    published: list[SeenName] = []
    subscriptions: list[SeenSubscription] = []
    events: list[SeenEvent] = []
    tally: list[SeenFunction] = []
    bounds: list[float] = []
    log: list[str] = []


class Unseen(msgspec.Struct, omit_defaults=True):
    """A worker of which there is no report. why: a sentence. how: "stopped" by a signal; "silent" if its
    process, of this host, does not answer; "unanswered" if it does not answer a member that asked it; or "" if it
    cannot be asked or does not permit it. stands_at: where threads of a silent process stand, if that was asked."""

    name: str = ""
    pid: int = 0
    hostname: str = ""
    why: str = ""
    how: str = ""
    stands_at: list[str] = []


# --- questions and answers at the endpoint of a process ---------------------------------------------------------------


class Look(msgspec.Struct, tag="look"):
    """Report on the workers of this process. tally: count calls by function, from now on until half a minute after the
    last such question. log: with the last lines of the log."""

    tally: bool = False
    log: bool = False


class LookAround(msgspec.Struct, tag="look_around"):
    """Let the worker `worker` of this process ask these members for their reports. patience: seconds for all. tally,
    log: as of `Look`."""

    worker: str
    members: list[str]
    patience: float = 2.0
    tally: bool = False
    log: bool = False


class Stacks(msgspec.Struct, tag="stacks"):
    """The stacks of the threads and tasks of this process. If `member` is set: of that one, which `worker` asks."""

    worker: str = ""
    member: str = ""
    patience: float = 2.0


class RecordGroup(msgspec.Struct, tag="record"):
    """Let the worker `worker` record its group for so many seconds. It ends early if the asking end closes."""

    worker: str
    seconds: float
    profile: bool = False


class Reports(msgspec.Struct, tag="reports"):
    reports: list[WorkerReport] = []
    unseen: list[Unseen] = []


class Text(msgspec.Struct, tag="text"):
    text: str = ""


class GroupTrace(msgspec.Struct, tag="trace"):
    """trace: Chrome's JSON."""

    trace: bytes = b""


class Refused(msgspec.Struct, tag="refused"):
    """The question cannot be answered. why: a sentence."""

    why: str = ""


Question = Look | LookAround | Stacks | RecordGroup
Answer = Reports | Text | GroupTrace | Refused
#: Bytes of one question at most, and of one answer.
LONGEST_QUESTION, LONGEST_ANSWER = 64 * 1024, 256 * 1024 * 1024
