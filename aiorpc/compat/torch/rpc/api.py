"""Stands as ``torch.distributed.rpc.api``: the verbs, and the steps of joining and leaving that programs replace.

The steps are looked up here each time, so a program may replace one by its own function.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import cloudpickle

from ....collecting import wait_all, wait_alone
from ....errors import (
    NotAllowed,
    NotInitialized,
    PeerLeft,
    PeerLost,
    RpcError,
    RpcTimeout,
    RpcUsageError,
    SerializationError,
)
from ....futures import Future
from ....locks import RLock
from ....logs import logger
from ....protocol.codec import Incoming, Outgoing, loads
from ....protocol.identity import WorkerInfo
from ....protocol.plain import names_nothing
from ....protocol.reference_messages import Role
from ....protocol.trees import read_tree, write_tree
from ....runtime.caller.misuse import check_arguments
from ....runtime.caller.peer import Peer
from ....runtime.calls.current import current_call
from ....runtime.calls.declared import pack
from ....runtime.calls.functions import intrinsic
from ....runtime.group.events import Listener
from ....runtime.node import Node, registry
from .. import script
from .agent import process
from .arrivals import Arrivals, Said
from .constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from .internal import PythonUDF, _internal_rpc_pickler, run_serialized
from .rref import PyRRef, RRef

__all__ = [
    "AllGatherStates",
    "RRef",
    "get_worker_info",
    "method_factory",
    "new_method",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

F = TypeVar("F", bound=Callable[..., object])

# Leaked references at the end are no error by default.
_ignore_rref_leak = True
_default_pickler: Any = _internal_rpc_pickler
_thread_local_var = threading.local()
_TELL = 5.0  # seconds to tell other workers of a gone one
_LOOK = 0.1  # seconds between two checks for lost workers
_DIGITS = 20  # of the number of an `_all_gather`, at most
_LEAST = 0.001  # seconds, of a time that has passed: 0 is no limit


# --- the agent --------------------------------------------------------------------------------------------------------


def _is_current_rpc_agent_set() -> bool:
    """Whether RPC was initialized in this process."""
    return process.agent is not None and not getattr(process.agent, "forked", False)


def _get_current_rpc_agent() -> Any:
    """The agent of this process. RuntimeError if RPC was not initialized."""
    if process.agent is None:
        raise NotInitialized("Current RPC agent is not set! Did you initialize the RPC framework (e.g. init_rpc)?")
    return process.agent


def _set_and_start_rpc_agent(agent: object) -> None:
    """Set the agent of this process."""
    process.agent = agent


def _reset_current_rpc_agent() -> None:
    """Remove the agent of this process."""
    process.agent = None


def _require_initialized(func: F) -> F:
    """A decorator: the function raises RuntimeError if RPC was not initialized."""

    @functools.wraps(func)
    def wrapper(*args: object, **kwargs: object) -> object:
        if not _is_current_rpc_agent_set():
            raise NotInitialized("RPC has not been initialized. Call torch.distributed.rpc.init_rpc first.")
        return func(*args, **kwargs)

    return wrapper  # type: ignore[return-value]  # wraps keeps the signature


def _init_rpc_states(agent: Any) -> None:
    """An agent has joined its group."""
    global _ALL_WORKER_NAMES
    _ALL_WORKER_NAMES = {info.name for info in agent.get_worker_infos()}
    if not _is_current_rpc_agent_set():
        _set_and_start_rpc_agent(agent)
    node = _node_of(agent)
    if node is not None:
        news = node.events.listen()  # when the loop next runs the task
        node.engine.call_on_loop(lambda: node.engine.tasks.spawn(_forget_who_is_gone(node, news)))


@_require_initialized
def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """Name and id of this worker, or of another one by its name. RuntimeError if the group has none."""
    info: WorkerInfo = _get_current_rpc_agent().get_worker_info(worker_name)
    return info


# --- verbs ------------------------------------------------------------------------------------------------------------


def _find(node: Node, to: str | int | WorkerInfo) -> Peer:
    if not isinstance(to, (str, int, WorkerInfo)):
        raise ValueError(f"Cannot get WorkerInfo from name {to}")
    return node.peers.find(to)


def _start(to: Any, func: Any, args: Any, kwargs: object, timeout: float) -> Future[object]:
    node = registry.get()
    sent = _callable(func, args, kwargs)
    return _find(node, to).call(sent[0], sent[1] or (), sent[2], node.engine.timeout(timeout), depth=3)


def _callable(func: object, args: object, kwargs: Any) -> tuple[Any, Any, Any]:
    """The function to send: for a script function, or with a program's own pickler, a stand-in."""
    if not callable(func):
        raise TypeError("function should be callable.")
    # As in torch: any sequence will do, also a string; a false value means no arguments by name.
    if args is not None and not isinstance(args, Sequence):
        args, _ = check_arguments(args, None)
    if kwargs and type(kwargs) is not dict:
        _, kwargs = check_arguments((), kwargs)
    if script.is_script(func):
        return (*script.by_name(func, args, kwargs), None)
    if _default_pickler is _internal_rpc_pickler:
        return func, args, kwargs
    data, tensors = _default_pickler.serialize(PythonUDF(func, args or (), kwargs or {}))
    return run_serialized, (_default_pickler.deserialize, data, tensors), None


def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[object] | None = None,
    kwargs: dict[str, object] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> object:
    """Run ``func(*args, **kwargs)`` on a worker and block for the result; raises the function's error."""
    registry.get().engine.refuse_on_loop("rpc_sync()", "await aiorpc.call(...)")
    return wait_alone(_start(to, func, args, kwargs, timeout))


def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., object],
    args: Sequence[object] | None = None,
    kwargs: dict[str, object] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[object]:
    """Run ``func(*args, **kwargs)`` on a worker; returns a Future at once, to wait for or to await."""
    future = _start(to, func, args, kwargs, timeout)
    collected = getattr(_thread_local_var, "future_list", None)
    if collected is not None:
        collected.append(future)
    return future


def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., object],
    args: Sequence[object] | None = None,
    kwargs: dict[str, object] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> PyRRef[object]:
    """An RRef of the result of ``func(*args, **kwargs)`` on a worker; returns at once, the result stays there."""
    node = registry.get()
    func, args, kwargs = _callable(func, args, kwargs)
    made = node.references.create(_find(node, to), func, args or (), kwargs, node.engine.timeout(timeout), depth=2)
    return made  # type: ignore[return-value]  # what references make is PyRRef while this is installed


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Within it all Futures of `rpc_async` in this thread are collected; at its end they are waited for."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: object) -> Iterator[None]:
    """Within it calls are pickled by another pickler, with ``serialize`` and ``deserialize`` as in `internal`."""
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


def method_factory(method_name: str, docstring: str) -> Callable[..., object]:
    """A method that calls the method of the same name on an RRef."""

    def method(self: object, *args: object, **kwargs: object) -> object:
        return getattr(self, method_name)(*args, **kwargs)

    method.__doc__ = docstring
    return method


new_method: Callable[..., object] = method_factory("to_here", PyRRef.to_here.__doc__ or "")


# --- meeting ----------------------------------------------------------------------------------------------------------


class AllGatherStates:
    """One `_all_gather` that this worker takes part in: objects by the worker's name, and whether they are all there.

    names: of the workers that take part, from this worker's program. own: this worker's.
    """

    def __init__(self, names: Iterable[str] = (), own: str = "") -> None:
        self.names: frozenset[str] = frozenset(names)
        self.own = own
        self.gathered_objects: dict[str, bytes] = {}
        self.proceed_signal: threading.Event = threading.Event()

    def add(self, sequence_id: str, worker_name: str, obj: bytes) -> None:
        """On the leader: take a worker's object. AssertionError if it takes no part, or has come before."""
        if worker_name not in self.names or self.own != min(self.names):
            raise AssertionError(f"{worker_name} is not expected by leader.")
        if worker_name in self.gathered_objects:
            raise AssertionError(f"{worker_name} reported intent sequence id {sequence_id} twice. ")
        self.gathered_objects[worker_name] = obj
        if self.names == set(self.gathered_objects):
            self.proceed_signal.set()

    def finish(self, sequence_id: str, leader: str | None, objects_map: dict[str, bytes]) -> None:
        """On the others: take the leader's result. AssertionError if it comes from another worker, or twice.

        leader: None in a program's own call of the handler.
        """
        if leader not in (None, min(self.names)) or self.own == min(self.names):
            raise AssertionError(f"{leader} is not the leader of this _all_gather.")
        if not self.names.issuperset(objects_map):
            raise AssertionError("the leader has gathered objects of workers that take no part.")
        if self.proceed_signal.is_set():
            raise AssertionError(f"Termination signal sequence id {sequence_id} got set twice.")
        self.gathered_objects = objects_map
        self.proceed_signal.set()


_ALL_WORKER_NAMES: set[str] = set()
_all_gather_dict_lock = RLock()
_all_gather_sequence_id: dict[str, int] = {}
_all_gather_sequence_id_to_states: dict[str, AllGatherStates] = {}
_arrivals = Arrivals()
_looked_for: set[int] = set()  # ids of members that another one has reported as gone


def _begin(names: set[str], own: str) -> tuple[str, AllGatherStates]:
    """The next `_all_gather` of some workers, with the messages that have come for it."""
    leader = min(names)
    with _all_gather_dict_lock:
        sequence_id = _next_sequence_id(names)
        states = _all_gather_sequence_id_to_states[sequence_id] = AllGatherStates(names, own)
        for name, said in _arrivals.take(sequence_id):
            with contextlib.suppress(AssertionError):  # the worker takes no part, which is known only now
                if isinstance(said, dict):
                    states.finish(sequence_id, name, said)
                elif name is not None and own == leader:
                    states.add(sequence_id, name, said)
    return sequence_id, states


def _keep_for_later(sequence_id: str, name: str | None, said: Said, leader: str | None) -> None:
    """Keep a worker's message for a gathering that has not begun here, with the lock held. leader: the claimed leader,
    whose name comes first.

    AssertionError if the id shows that one of both workers takes no part; checked again once it begins.
    """
    if _has_begun(sequence_id):
        return  # it is over here: this worker did not wait so long
    call = current_call.get(None)
    if call is None:
        _arrivals.keep(None, name, sequence_id, said, sys.maxsize)
        return
    node = cast(Node, call.node)
    if name is None or name not in sequence_id or node.engine.name not in sequence_id:  # it is all names, joined
        raise AssertionError(f"{name} is not expected by leader.")
    if leader is not None and not sequence_id.startswith(leader):
        raise AssertionError(f"{leader} is not the leader of this _all_gather.")
    _arrivals.forget(node.group.has_gone)
    if node.group.has_gone(call.caller_id):
        return
    _arrivals.keep(call.caller_id, name, sequence_id, said, node.engine.options.max_queued_bytes)


def _has_begun(sequence_id: str) -> bool:
    """Whether this worker has begun a gathering, with the lock held."""
    for joined, begun in _all_gather_sequence_id.items():
        number = sequence_id.removeprefix(joined)
        if sequence_id.startswith(joined) and number.isdecimal() and len(number) < _DIGITS and int(number) < begun:
            return True
    return False


async def _forget_who_is_gone(node: Node, news: Listener) -> None:
    """Drop messages of gone members for gatherings that have not begun here."""
    async for _ in news:
        with _all_gather_dict_lock:
            _arrivals.forget(node.group.has_gone)


def _caller() -> str | None:
    """The worker whose call the running handler serves."""
    call = current_call.get(None)
    return call.caller.name if call is not None else None


@intrinsic
def _gather_to_leader(sequence_id: str, worker_name: str, obj: bytes, worker_names: list[str] | None = None) -> None:
    """Handler, on the leader: a worker has come, with its object, which only `_all_gather` reads.

    worker_names: as torch has it; it is this worker's own program that says who takes part.
    """
    caller = _caller()
    if caller is not None and caller != worker_name:
        raise AssertionError(f"{caller} speaks for {worker_name}.")
    with _all_gather_dict_lock:
        states = _all_gather_sequence_id_to_states.get(sequence_id)
        if states is not None:
            states.add(sequence_id, worker_name, obj)
        else:
            call = current_call.get(None)
            _keep_for_later(sequence_id, worker_name, obj, None if call is None else cast(Node, call.node).engine.name)


@intrinsic
def _broadcast_to_followers(sequence_id: str, objects_map: dict[str, bytes]) -> None:
    """Handler, on all others: the leader says that every worker has come."""
    caller = _caller()
    with _all_gather_dict_lock:
        states = _all_gather_sequence_id_to_states.get(sequence_id)
        if states is not None:
            states.finish(sequence_id, caller, objects_map)
        else:
            _keep_for_later(sequence_id, caller, objects_map, caller)


@_require_initialized
def _all_gather(
    obj: object, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, object]:
    """What all workers of those names, all there are by default, gave here, by name; blocks until all have come.

    The first by name leads. timeout: seconds, 0 for no limit; by default calls have the worker's. RuntimeError for a
    worker that does not answer in time; PeerLost once one of them is lost.
    """
    names = set(worker_names or _ALL_WORKER_NAMES)
    leader, node = min(names), _node_of(_get_current_rpc_agent())
    own = _get_current_rpc_agent().get_worker_info().name
    calls = timeout if node is None or timeout != UNSET_RPC_TIMEOUT else node.engine.default_timeout
    sequence_id, states = _begin(names, own)
    begun = time.monotonic()
    try:
        packed = _to_bytes(obj, node)
        if own == leader:
            if 0 < calls < time.monotonic() - begun:
                raise RpcTimeout(f"{own!r} timed out in _all_gather after {calls:.2f} seconds, writing its object")
            with _all_gather_dict_lock:
                states.add(sequence_id, own, packed)
        else:
            _report(leader, (sequence_id, own, packed, pack(sorted(names))), calls, begun)
        limited = timeout not in (UNSET_RPC_TIMEOUT, DEFAULT_SHUTDOWN_TIMEOUT)
        _await_signal(states.proceed_signal, timeout if limited else None, names, node)
        _fail_if_missing(sequence_id, states, names, node)
        if own == leader:
            _tell_followers(sequence_id, states.gathered_objects, sorted(names - {leader}), calls)
    finally:
        with _all_gather_dict_lock:
            del _all_gather_sequence_id_to_states[sequence_id]
    return {
        name: obj if name == own else _from_bytes(given, node, names) for name, given in states.gathered_objects.items()
    }


def _to_bytes(obj: object, node: Node | None) -> bytes:
    """An object for the others. SerializationError if it cannot travel."""
    if node is not None and node.engine.safe:
        out = Outgoing(safe=True)
        tree = write_tree(obj, out)
        if out.tensors or out.buffers or out.references:
            raise SerializationError("_all_gather takes no tensors where serialization is 'safe'")
        return tree
    try:
        return pickle.dumps(obj, 5)
    except Exception:  # what has no name goes by value
        packed: bytes = cloudpickle.dumps(obj, 5)
        return packed


def _from_bytes(given: bytes, node: Node | None, names: set[str]) -> object:
    """What a worker gave. NotAllowed for more than plain values where one of these workers may not have all run here.

    The leader has handed it on, so the rights of one of them say nothing of another.
    """
    inside = Incoming((), ())
    if node is None:
        return loads(given, inside)
    if node.engine.safe:
        return read_tree(given, inside)
    roles = {each.role for each in node.group.members.values() if each.name in names}
    if any(map(node.engine.rights.limited, roles)) and not names_nothing(given):
        raise NotAllowed(
            f"a worker gave _all_gather more than plain values, and the option allow of worker {node.engine.name!r} "
            "does not let all of them have everything run",
            worker=node.engine.name,
            function="_all_gather",
        )
    return loads(given, inside)


def _report(leader: str, args: tuple[object, ...], seconds: float, begun: float) -> None:
    """Send the object to the leader.

    After the timeout this waits no more, but the message still counts: the leader waits for it. So the call has no
    limit of its own, which would take it back. begun: when encoding the object began; the timeout counts from there.
    """
    if seconds <= 0:
        rpc_sync(leader, _gather_to_leader, args, timeout=seconds)
        return
    call = _start(leader, _gather_to_leader, args, None, 0)
    try:
        left = seconds - (time.monotonic() - begun)
        if left <= 0:
            raise RpcTimeout("its own object took longer to be written")
        call.wait(left)
    except RpcTimeout as error:
        text = f"RPC ran for more than set timeout ({seconds:g} s): {error}"
        raise RpcTimeout(text, worker=leader, function=_gather_to_leader.__qualname__, seconds=seconds) from None


def _next_sequence_id(names: set[str]) -> str:
    joined = "".join(sorted(names))
    with _all_gather_dict_lock:
        number = _all_gather_sequence_id.get(joined, 0)
        _all_gather_sequence_id[joined] = number + 1
    return f"{joined}{number}"


def _await_signal(signal: threading.Event, seconds: float | None, names: set[str], node: Node | None) -> None:
    """Until it is set, the time is up, or one of those workers is gone."""
    limit = None if seconds is None else time.monotonic() + seconds
    while not signal.wait(_LOOK if limit is None else max(0.0, min(_LOOK, limit - time.monotonic()))):
        if _gone(names, node) or (limit is not None and time.monotonic() >= limit):
            return


def _gone(names: set[str], node: Node | None) -> list[WorkerInfo]:
    if node is None:
        return []
    members = list(node.group.members.values())
    there = {each.name for each in members if not node.group.is_gone(each)}
    return [each.info for each in members if each.name in names - there and node.group.is_gone(each)]


@intrinsic
async def _nobody_waits(sequence_id: str, name: str, number: int) -> None:
    """Handler: another worker reports that a worker is gone. A member without a connection to it does not see it leave;
    so it checks, and waiters for that worker see the result.
    """
    call = current_call.get()
    assert call is not None, "this is a handler"
    group = cast(Node, call.node).group
    if name not in sequence_id or call.caller.name not in sequence_id:
        raise AssertionError(f"{call.caller.name} takes no part in this _all_gather, or that worker does not.")
    for record in list(group.members.values()):
        if record.info == WorkerInfo(name, number) and not group.is_gone(record) and record.id not in _looked_for:
            _looked_for.add(record.id)
            try:
                if not await group.look_for_farewell(record):
                    group.on_report(call.caller_id, record, "it is gone, says a worker that waits for it")
            finally:
                _looked_for.discard(record.id)


def _fail_if_missing(sequence_id: str, states: AllGatherStates, names: set[str], node: Node | None) -> None:
    """PeerLost once one of those workers is gone before all were there; the others come to know."""
    gone = _gone(names, node)
    if not gone or states.proceed_signal.is_set():
        return
    name, rank = gone[0].name, gone[0].id
    others = names - {each.name for each in gone} - {states.own}
    calls = [rpc_async(other, _nobody_waits, (sequence_id, name, rank), timeout=_TELL) for other in sorted(others)]
    for call in calls:
        with contextlib.suppress(RpcError):  # that one is gone as well
            call.wait()
    raise PeerLost(f"worker {name} (rank {rank}) is gone, and will not come", worker=name, rank=rank)


def _tell_followers(sequence_id: str, gathered: dict[str, bytes], names: list[str], seconds: float) -> None:
    said = sequence_id, pack(gathered)
    calls = {name: rpc_async(name, _broadcast_to_followers, said, timeout=seconds) for name in names}
    errors: dict[str, BaseException] = {}
    for name, call in calls.items():
        try:
            call.wait()
        except Exception as error:
            errors[name] = error
    failed = {name: error for name, error in errors.items() if not isinstance(error, (PeerLost, PeerLeft))}
    for first in failed.values():  # torch has the same text for all errors
        raise RuntimeError(
            f"Followers {list(failed)} timed out in _all_gather after {seconds:.2f} seconds. "
            f"The first exception is {first}"
        ) from first
    for lost in errors.values():
        raise lost


@_require_initialized
def _barrier(worker_names: Iterable[str]) -> None:
    """Block until all workers of those names have come here. An error is logged."""
    try:
        _all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("Failed to complete barrier")


# --- leaving ----------------------------------------------------------------------------------------------------------


@_require_initialized
def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Block until all workers have come here. timeout: seconds, 0 for no limit; RuntimeError when it has passed."""
    try:
        _all_gather(None, timeout=timeout)
    except (PeerLost, PeerLeft) as error:
        # With torch they hang. Here those that live leave together (`Worker.shutdown`), which is bounded.
        logger.warning("not everybody comes to the shutdown: %s", error)
    except RuntimeError:
        logger.exception("Failed to respond to 'Shutdown Proceed' in time")
        raise


def _delete_all_user_and_unforked_owner_rrefs() -> None:
    """All references here end, though the program may still have them: their owners may let go of the values."""
    node = _node_of(_get_current_rpc_agent())
    if node is None:
        return
    for handle in node.references.handles().values():
        if isinstance(handle, PyRRef) and not handle._deleted:
            handle._deleted = True
            node.references.end(handle)


def _destroy_rref_context(ignore_rref_leak: bool) -> None:
    """End all references. RuntimeError, unless ignored, if workers still held some."""
    report = getattr(_get_current_rpc_agent(), "report", None)
    if report is not None and report.references and not ignore_rref_leak:
        raise RuntimeError(
            "Leaking RRefs: these were still referred to when the group left: " + "; ".join(map(str, report.references))
        )


def _cleanup_python_rpc_handler() -> None:
    """Nothing to do."""


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the group.

    graceful: serve until all workers have come here and their work is over. timeout: seconds for all of that, 0 for no
    limit; RuntimeError when it has passed, and the worker has left all the same.
    """
    agent = _get_current_rpc_agent()
    node = _node_of(agent)
    if node is not None:
        node.engine.refuse_on_loop("shutdown()", "await worker.shutdown()")
    if not graceful:
        _finalize_shutdown()
        return
    until = time.monotonic() + timeout
    try:
        if getattr(agent, "is_static_group", True):
            _wait_all_workers(timeout)
            _delete_all_user_and_unforked_owner_rrefs()
        agent.join(shutdown=True, timeout=max(_LEAST, until - time.monotonic()) if timeout else timeout)
        report = getattr(agent, "report", None)
        if timeout and report is not None and report.timed_out and time.monotonic() >= until:
            raise RpcTimeout(f"shutdown: not all workers came and ended their work in {timeout:g} s", seconds=timeout)
    finally:
        _finalize_shutdown()


def _finalize_shutdown() -> None:
    try:
        _destroy_rref_context(_ignore_rref_leak)
    finally:
        _get_current_rpc_agent().shutdown()
        _cleanup_python_rpc_handler()
        with _all_gather_dict_lock:
            _arrivals.forget()
        _reset_current_rpc_agent()


# --- figures and settings ---------------------------------------------------------------------------------------------


def _rref_context_get_debug_info() -> dict[str, str]:
    """How many references there are, as text: values here, handles not confirmed yet, handles of values here.

    As with torch, ``RRef(value)`` counts once it was shared with another worker.
    """
    references = registry.get().references
    references.flush()
    counts = references.counts()
    with references._lock:
        records = references._table.live()
    handles: dict[Any, Any] = references.handles()
    counted = [each for each in records if each.role is Role.FORK or _was_remote(handles.get(each.fork))]
    figures = {
        "num_owner_rrefs": len({each.rref for each in counted if each.role is not Role.USER}),
        "num_pending_users": counts.pending,
        "num_pending_futures": counts.placeholders,
        "num_forks": sum(each.role is not Role.USER for each in counted),
    }
    return {name: str(value) for name, value in figures.items()}


def _was_remote(handle: Any) -> bool:
    """Whether a handle was made by `remote`, and not by ``RRef(value)``."""
    return handle is not None and handle._creation is not None


def get_rpc_timeout() -> float:
    """Seconds that calls have by default."""
    return _node_of_agent().engine.default_timeout


def _set_rpc_timeout(seconds: float) -> None:
    """Set the seconds that calls have by default, 0 for no limit."""
    if seconds < 0:
        raise RpcUsageError(f"a timeout is a number of seconds >= 0, not {seconds}")
    _node_of_agent().engine.default_timeout = float(seconds)


def enable_gil_profiling(flag: bool) -> None:
    """Whether the agent's figures include the time that the worker waits for the interpreter lock."""
    _get_current_rpc_agent().gil_profiling = flag


def _node_of_agent() -> Node:
    node: Node = _get_current_rpc_agent().worker._node
    return node


def _node_of(agent: Any) -> Node | None:
    """The node of an agent's worker; an agent of a program's own has none."""
    worker = getattr(agent, "worker", None)
    return None if worker is None else worker._node
