"""Every error of aiorpc, as one tree. The ones that most programs catch are also at the top of `aiorpc`.

The class tells the kind of failure, fields its place, and ``str()`` a sentence. No program needs to parse text.

    RpcError (RuntimeError)
    ├── RpcUsageError            the caller did something that cannot work; nothing was sent
    │   ├── SerializationError (TypeError)   an argument or result cannot travel
    │   ├── WouldBlockLoop           a blocking verb on the thread that runs the worker's own loop
    │   ├── UnknownWorker (LookupError)  no worker of that name
    │   ├── NotInitialized           no current worker, or more than one and no context
    │   ├── optim.NoGradients        a step of an optimizer, with no gradient in the context
    │   └── nn.RemoteModuleError (ValueError)    a RemoteModule that cannot be, or cannot do that
    ├── RendezvousError          the workers could not agree on who they are
    │   ├── DeviceMapError (ValueError)  devices or device maps that do not exist or do not fit
    │   └── StoreGone                the store where they meet has ended, or was removed
    ├── UnknownObject (LookupError)  the other worker serves no object of that name; nothing was run
    ├── Overloaded               a queue is at its limit; the call was not run, or its result was dropped
    ├── NotAllowed (PermissionError)  the other worker does not run that for this caller
    ├── RpcTimeout (TimeoutError)    the deadline passed; the callee may or may not have run
    ├── RpcCancelled             the call was cancelled
    ├── PeerLost (ConnectionError)   the other worker died or the network broke
    ├── PeerLeft (ConnectionError) the other worker left in good order
    ├── WorkerClosed             this worker has shut down
    ├── PeerRefused (ConnectionError)   the other side refused us: version, secret, identity
    ├── GroupError (ExceptionGroup)  of a call to several workers too few gave a value
    ├── ProtocolError            the other side sent something that is no frame of ours
    ├── QueueEmpty (asyncio.QueueEmpty)     get_nowait() of a queue that has no item
    ├── QueueFull (asyncio.QueueFull)       put_nowait() on a queue that has no room
    ├── QueueShutDown (asyncio.QueueShutDown)   the queue takes no items any more, or has no more to come
    ├── ItemLost                 items of a queue went with the worker that had them
    └── RemoteError              the remote function raised
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

__all__ = [
    "DeviceMapError",
    "GroupError",
    "ItemLost",
    "NotAllowed",
    "NotInitialized",
    "Overloaded",
    "PeerLeft",
    "PeerLost",
    "PeerRefused",
    "ProtocolError",
    "QueueEmpty",
    "QueueFull",
    "QueueShutDown",
    "RemoteError",
    "RendezvousError",
    "RpcCancelled",
    "RpcError",
    "RpcTimeout",
    "RpcUsageError",
    "SerializationError",
    "StoreGone",
    "UnknownObject",
    "UnknownWorker",
    "WorkerClosed",
    "WouldBlockLoop",
]

if sys.version_info >= (3, 13):
    _ShutDown = asyncio.QueueShutDown
else:
    _ShutDown = Exception


class RpcError(RuntimeError):
    """Base of all errors of aiorpc; a ``RuntimeError``, as torch.distributed.rpc raises."""


class RpcUsageError(RpcError):
    """The caller asked for something that cannot work. Nothing was sent."""


class SerializationError(RpcUsageError, TypeError):
    """An argument or a result cannot be serialised, or the callee cannot read an argument; the text names it.

    If the callee cannot read it, nothing was run.

    position: its place in the message, from 0.
    """

    def __init__(self, message: str, position: int = 0) -> None:
        super().__init__(message)
        self.position = position


class WouldBlockLoop(RpcUsageError):
    """A blocking verb on the thread of the loop that it would wait for. Nothing was sent.

    The text tells what to await instead.
    """


class UnknownWorker(RpcUsageError, LookupError):
    """There is no worker of that name, rank or id."""


class NotInitialized(RpcUsageError):
    """There is no worker in this process, or there are several and none is current."""


class RendezvousError(RpcError):
    """The workers could not agree on names, ids or world size, or could not reach the store."""


class DeviceMapError(RendezvousError, ValueError):
    """An invalid device or device map: raised when it is set, or by all members of the group when they join."""


class StoreGone(RendezvousError):
    """The store where the workers meet is gone: its process ended, its file was removed, or it cannot be reached."""


class UnknownObject(RpcError, LookupError):
    """The other worker serves no object of that name, not yet or not any more. Nothing was run.

    worker: which worker.
    name: of the object.
    names: of the objects that it serves; empty if the caller may not know them.
    """

    def __init__(self, message: str, *, worker: str = "", name: str = "", names: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.worker = worker
        self.name = name
        self.names = names


class QueueEmpty(RpcError, asyncio.QueueEmpty):
    """``get_nowait()`` of a queue that has no item."""


class QueueFull(RpcError, asyncio.QueueFull):
    """``put_nowait()`` on a queue that has no room."""


class QueueShutDown(RpcError, _ShutDown):
    """The queue was shut down: it takes no more items, or all its items have been got.

    An ``asyncio.QueueShutDown`` from Python 3.13 on.
    """


class ItemLost(RpcError):
    """Items of a queue are gone with the worker that had them. The queue goes on.

    queue: its name.
    worker: the worker that had put and kept them, or had got them and not finished.
    count: how many items they are.
    """

    def __init__(self, message: str, *, queue: str = "", worker: str = "", count: int = 0) -> None:
        super().__init__(message)
        self.queue = queue
        self.worker = worker
        self.count = count


class Overloaded(RpcError):
    """A limit was reached: the call was not run, or its result was dropped.

    The text tells which, and names the option of the limit.
    """


class NotAllowed(RpcError, PermissionError):
    """The callee does not allow that for this caller (its option ``allow``). Nothing was run, and nothing unpickled.

    worker: the callee.
    caller, role: the worker that called, and its role.
    function: what was called.
    rule: what the callee allows that role.
    """

    def __init__(
        self, message: str, *, worker: str = "", caller: str = "", role: str = "", function: str = "", rule: str = ""
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.caller = caller
        self.role = role
        self.function = function
        self.rule = rule


class RpcTimeout(RpcError, TimeoutError):
    """The deadline passed. The function may have run, or may run still: the callee was told to stop.

    worker: the callee's name.
    function: what was called.
    seconds: how long it had.
    late: why the caller's own loop did not end the call in time and a thread had to; usually "".
    """

    def __init__(self, message: str, *, worker: str = "", function: str = "", seconds: float = 0.0) -> None:
        super().__init__(message)
        self.worker = worker
        self.function = function
        self.seconds = seconds
        self.late = ""


class RpcCancelled(RpcError):
    """The call was cancelled before it was answered. The callee was told; it may have run in part."""


class PeerLost(RpcError, ConnectionError):
    """Another worker died, or cannot be reached any more. The function may have run.

    worker, rank, host, pid: which worker it was.
    cause: the observed cause, such as the signal that ended its process.
    """

    def __init__(
        self, message: str, *, worker: str = "", rank: int = -1, host: str = "", pid: int = 0, cause: str = ""
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.rank = rank
        self.host = host
        self.pid = pid
        self.cause = cause


class PeerLeft(RpcError, ConnectionError):
    """Another worker left in good order before it answered, or is leaving and takes no more calls.

    A worker that was lost raises PeerLost. This worker's own end raises WorkerClosed.
    """


class WorkerClosed(RpcError):
    """This worker is leaving, has left, or has not joined yet.

    For another worker that has left PeerLeft is raised.
    """


class PeerRefused(RpcError, ConnectionError):
    """The other side refused the connection: another version of the protocol, another secret, or another group."""


class GroupError(RpcError, ExceptionGroup[Exception]):
    """A call to several workers got fewer values than were wanted.

    Its `exceptions` are the members' errors, in their order.

    failed: the names of the members whose function raised.
    lost: of members that died or left before they answered.
    missing: of members that did not answer in time, or could not be asked.
    """

    def __new__(cls, message: str, errors: Sequence[Exception] = ()) -> GroupError:
        """errors: of the members; without any, the message stands for them."""
        return ExceptionGroup.__new__(cls, message, errors or [RpcError(message)])

    def __init__(self, message: str, errors: Sequence[Exception] = ()) -> None:
        super().__init__(message, errors)
        self.failed: tuple[str, ...] = ()
        self.lost: tuple[str, ...] = ()
        self.missing: tuple[str, ...] = ()

    def derive(self, errors: Sequence[Exception], /) -> GroupError:  # type: ignore[override]  # typed for any exceptions
        """A part of it, for ``except*``."""
        part = GroupError(self.message, errors)
        part.failed, part.lost, part.missing = self.failed, self.lost, self.missing
        return part

    def __str__(self) -> str:
        return self.message


class ProtocolError(RpcError):
    """The other side sent bytes that break the protocol."""


class RemoteError(RpcError):
    """The remote function raised an exception that cannot be made again here.

    type_name: qualified name of the type of the remote exception.
    remote_message: its text.
    remote_traceback: the remote traceback as text.
    worker: where it was raised.
    """

    def __init__(
        self,
        message: str,
        *,
        type_name: str = "",
        remote_message: str = "",
        remote_traceback: str = "",
        worker: str = "",
    ) -> None:
        super().__init__(message)
        self.type_name = type_name
        self.remote_message = remote_message
        self.remote_traceback = remote_traceback
        self.worker = worker


def __dir__() -> list[str]:
    return __all__
