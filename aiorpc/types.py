"""The types of the verbs' results: handles, results and records. aiorpc makes them; programs name them in annotations.

See the verb for each: `aiorpc.peer` returns a `PeerHandle`, `aiorpc.group` a `PeerGroup`, `aiorpc.serve` a
`ServedObject`, `aiorpc.queue` a `QueueHandle`, `aiorpc.stream` a `Stream`, `aiorpc.publish` a `Publication`,
`aiorpc.subscribe` a `Subscription`, `aiorpc.record` a `Recording`, `aiorpc.launched` a `Launched`.
"""

from __future__ import annotations

from .channels import Traffic
from .observability.recorder import RecordedWorker, Recording
from .protocol.identity import WorkerInfo
from .protocol.states import WorkerState
from .queues import QueueHandle
from .runtime.callee.objects import ServedObject
from .runtime.caller.handle import PeerHandle
from .runtime.caller.objects import ObjectHandle
from .runtime.caller.stream import Stream
from .runtime.calls.pending import PendingCall
from .runtime.fanout.group_call import GroupCall
from .runtime.fanout.group_object import GroupObject
from .runtime.fanout.group_stream import GroupStream
from .runtime.fanout.mapping import GroupMap
from .runtime.fanout.outcomes import Outcome, Outcomes
from .runtime.fanout.peer_group import PeerGroup
from .runtime.fanout.rref_group import RRefGroup
from .runtime.group.group import ShutdownReport
from .runtime.meeting.launchers import Launched
from .runtime.publication.readers import Delivery
from .runtime.publication.subscription import Publication, PublishedVersion, Subscription
from .runtime.statistics import Statistics

__all__ = [
    "Delivery",
    "GroupCall",
    "GroupMap",
    "GroupObject",
    "GroupStream",
    "Launched",
    "ObjectHandle",
    "Outcome",
    "Outcomes",
    "PeerGroup",
    "PeerHandle",
    "PendingCall",
    "Publication",
    "PublishedVersion",
    "QueueHandle",
    "RRefGroup",
    "RecordedWorker",
    "Recording",
    "ServedObject",
    "ShutdownReport",
    "Statistics",
    "Stream",
    "Subscription",
    "Traffic",
    "WorkerInfo",
    "WorkerState",
]


def __dir__() -> list[str]:
    return __all__
