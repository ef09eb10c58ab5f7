"""The options of a worker, each with its unit and default."""

from __future__ import annotations

import contextlib
import copy
import difflib
import inspect
import math
import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import FrozenInstanceError, InitVar, dataclass, field, fields
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Self, cast

from . import foreign
from .devices import Device, DeviceClaims, DeviceMap, extend_device_map, to_device_map, to_device_maps, to_devices
from .errors import RpcUsageError
from .rights import Allow, frozen

DEFAULT_RPC_TIMEOUT = 60.0
DEFAULT_NUM_WORKER_THREADS = 16
# Below this, in bytes, a copy into the frame costs less than a block of shared memory (measured: equal at 100 KB).
SHARE_SIZE = 128 * 1024
# Below this, in bytes, a buffer delays later messages by less than a millisecond, and goes in its frame.
BULK_SIZE = 256 * 1024
# A buffer on a device holds at least two pieces of 2 MiB: while one is filled the other is on its way.
MIN_DEVICE_BUFFER = 4 << 20
#: The default of ``drain_timeout``, in seconds: below the 30 s after which torchrun, Slurm and Kubernetes kill.
DRAIN_TIMEOUT = 25.0
#: Signals at which a worker may drain. Each ends a process that has no handler for it.
DRAINING_SIGNALS = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
# Several times the bytes after which a receiver acknowledges at once.
MIN_UNACKNOWLEDGED = 4 << 20
# More than any machine has of anything; larger numbers do not fit into a message.
MOST = 1 << 62


def _shown(value: object) -> str:
    """A short text of an option's value, for errors, even if its class raises."""
    try:
        return repr(value)[:80]
    except Exception:  # a number of more digits than Python writes, for example
        return f"a value of type {type(value).__name__}"


def seconds(value: float | timedelta, name: str) -> float:
    """A duration in seconds from a number, also one of numpy's, or a timedelta.

    Refuses negatives, NaN, and integers beyond all floats.
    """
    result = value.total_seconds() if isinstance(value, timedelta) else value
    if not isinstance(result, bool) and isinstance(result, (int, float, numbers.Real)) and result >= 0:
        with contextlib.suppress(OverflowError):
            return float(result)
    raise RpcUsageError(f"{name} must be a number of seconds >= 0 (0 means no limit), not {_shown(value)}")


def _check_integer(value: object, name: str, what: str, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
        most = ", and no more than 2**62" if isinstance(value, int) and value > MOST else ""
        raise RpcUsageError(f"{name} must be {what} >= {least}{most}, not {_shown(value)}")


def _is_path(value: object) -> bool:
    """Whether it can be the name of a file."""
    if not isinstance(value, (str, os.PathLike)):
        return False
    try:
        path = os.fsencode(value)
    except (TypeError, ValueError):
        return False
    return bool(path) and b"\0" not in path


def _memory() -> int:
    """Bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _part_of_memory() -> int:
    """Bytes: a quarter of the machine's memory."""
    return _memory() // 4


def _quarter_of_memory() -> int:
    """Bytes: a quarter of the machine's memory, at most 4 GiB."""
    return min(_part_of_memory(), 4 << 30)


def _check_host(value: object, name: str) -> None:
    """Raise RpcUsageError for an invalid host name or address. Does not look it up."""
    reason = ""
    try:
        if value is None or (isinstance(value, str) and value and "\0" not in value and value.encode("idna")):
            return
    except UnicodeError as error:
        reason = f": {error}"
    raise RpcUsageError(f"{name} must be a host name or an address, not {_shown(value)}{reason}")


def host_and_port(value: object, name: str) -> tuple[str, int]:
    """Host and port of ``host:port``, or of ``[address]:port`` for IPv6. RpcUsageError if it is none."""
    if isinstance(value, str):
        host, _, port = value.rpartition(":")
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else "" if ":" in host else host
        if host and port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 65_536:
            _check_host(host, f"{name}: the host")
            return host, int(port)
    raise RpcUsageError(
        f"{name} must be host:port, such as 127.0.0.1:9400, or with port 0 for any, not {_shown(value)}"
    )


@dataclass(frozen=True)
class Tls:
    """Files by which workers prove their identity over TCP. Read when a worker joins, and again when they have changed.

    cert: this worker's certificate in PEM, followed by intermediate certificates, if any. Its DNS names list the
    workers that may use it: ``*`` stands for any characters (``actor-*``). key: its key, in PEM, without a password,
    readable by its owner alone. ca: certificates of the authorities of other workers' certificates.
    verify_names: whether the certificate of a worker has to have its name; if not, any certificate of the authority
    will do.
    """

    cert: str | os.PathLike[str]
    key: str | os.PathLike[str]
    ca: str | os.PathLike[str]
    verify_names: bool = True

    def __post_init__(self) -> None:
        """Raises RpcUsageError for an invalid path."""
        for name in ("cert", "key", "ca"):
            value = getattr(self, name)
            if not _is_path(value):
                raise RpcUsageError(f"{name} of Tls must be the path of a file, not {_shown(value)}")
        if not isinstance(self.verify_names, bool):
            raise RpcUsageError(f"verify_names of Tls must be True or False, not {_shown(self.verify_names)}")

    @classmethod
    def _from_environment(cls, environment: Mapping[str, str]) -> Tls | None:
        """From AIORPC_TLS_CERT, _KEY, _CA and _VERIFY_NAMES; None if none of them is set. Raises RpcUsageError."""
        found = {name: environment.get(f"AIORPC_TLS_{name.upper()}") for name in ("cert", "key", "ca", "verify_names")}
        if all(value is None for value in found.values()):
            return None
        missing = [f"AIORPC_TLS_{name.upper()}" for name in ("cert", "key", "ca") if not found[name]]
        if missing:
            raise RpcUsageError(f"TLS needs {', '.join(missing)} too, or none of the variables AIORPC_TLS_*")
        verify = found["verify_names"] or "1"
        if verify not in ("0", "1"):
            raise RpcUsageError(f"AIORPC_TLS_VERIFY_NAMES must be 0 or 1, not {verify!r}")
        return cls(found["cert"] or "", found["key"] or "", found["ca"] or "", verify == "1")


def _as_set(maps: dict[str, DeviceMap]) -> dict[str, dict[Device, Device]]:
    """Cast to the type of the field, which allows all forms of devices; the values are torch's devices."""
    return cast("dict[str, dict[Device, Device]]", maps)


class _Group:
    """A group of options. Immutable; `_given` has the names of those that were given."""

    _given: frozenset[str]

    def __new__(cls, *_: object, **given: object) -> Self:
        made = super().__new__(cls)
        made.__dict__["_given"] = frozenset(given)
        return made

    def __post_init__(self) -> None:
        self._check()
        self.__dict__["_made"] = True

    def __setattr__(self, name: str, value: object) -> None:
        if "_made" in self.__dict__:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super().__setattr__(name, value)

    def _check(self) -> None:
        """Raise RpcUsageError naming the first invalid option; bring options with several forms into the type of their
        fields.
        """
        raise NotImplementedError

    def _check_durations(self, *names: str) -> None:
        """Make seconds of options. Only 0 means no limit."""
        for name in names:
            value = seconds(getattr(self, name), name)
            if value == math.inf:
                raise RpcUsageError(f"{name} must be a finite number of seconds (0 means no limit), not {value!r}")
            setattr(self, name, value)

    def _check_integers(self, *names: str) -> None:
        for name in names:
            _check_integer(getattr(self, name), name, "an integer", 1)


@dataclass(kw_only=True)
class LimitOptions(_Group):
    """How much others may make a worker hold: ``RpcBackendOptions(limits=...)``. Immutable.

    The reference describes each limit under "What others can make a worker hold".

    max_pending_calls: calls one peer may owe us before ``Overloaded`` is raised here.
    max_queued_calls: calls one caller may have waiting or running here before it is answered ``Overloaded``; and as
        many that wait at one queue for an item or for room.
    max_call_rate: calls a second that one caller may make here, before it is answered ``Overloaded``. As many at once,
        if it has made none for a second, and so up to twice as many within one second. None: any number.
    max_queued_bytes: bytes of arguments that the calls of one caller, waiting or running here, may have had, before it
        is answered ``Overloaded``, unless a call has next to none; a quarter of the machine's memory by default.
    max_frame_bytes: longest message body taken from a peer, tensors apart.
    max_tensor_bytes: longest single tensor taken from a peer.
    max_incoming_bytes: bytes of tensors of one peer that may be under way to here at once, over each of its
        connections, before that ends; the machine's memory by default.
    max_unsent_bytes: bytes of answers and of items of streams that may wait here until one caller reads them; from half
        of it on no more of its calls are started, and none are read; past it results are dropped, and ``Overloaded`` is
        answered; a quarter of the machine's memory by default.
    stream_window: items of a stream that may be under way before its producer waits.
    max_stream_window: items of one stream that a consumer may have asked for ahead here, or its call is answered
        ``Overloaded``.
    max_streams: streams that one consumer may have open here before it is answered ``Overloaded``.
    max_references: references to values of this worker that one other worker may have made or been passed, or may ask
        for, before its connection ends; each costs about 1 KiB, and the value that it keeps. Those that this worker has
        given it, as results or arguments, do not count.
    max_contexts: autograd contexts that calls of one caller may have brought here, and that have not ended, before its
        calls in further ones are answered ``Overloaded``.
    max_remembered_answers: answers of idempotent calls that are remembered for one caller, to be given again; the
        oldest are forgotten.
    max_remembered_bytes: bytes of these answers.
    """

    max_pending_calls: int = 65_536
    max_queued_calls: int = 131_072
    max_call_rate: float | None = None
    max_queued_bytes: int = field(default_factory=_part_of_memory)
    max_frame_bytes: int = 1 << 30
    max_tensor_bytes: int = 1 << 40
    max_incoming_bytes: int = field(default_factory=_memory)
    max_unsent_bytes: int = field(default_factory=_part_of_memory)
    stream_window: int = 16
    max_stream_window: int = 65_536
    max_streams: int = 16_384
    max_references: int = 1 << 20
    max_contexts: int = 65_536
    max_remembered_answers: int = 1024
    max_remembered_bytes: int = 16 << 20

    def _check(self) -> None:
        self._check_integers(*(each.name for each in fields(LimitOptions) if each.name != "max_call_rate"))
        rate = self.max_call_rate
        if rate is not None and (type(rate) not in (int, float) or not 0 < rate <= MOST):
            raise RpcUsageError(f"max_call_rate must be a number of calls above 0, or None for any, not {_shown(rate)}")


@dataclass(kw_only=True)
class NetworkOptions(_Group):
    """How other workers reach a worker: ``RpcBackendOptions(network=...)``. Immutable.

    address: the host or address others reach this worker at over TCP (containers, NAT); found by itself if None.
    bind_address: the local address the TCP listener binds; that of the interface that reaches the rendezvous if None.
    port_range: first and last TCP port to listen on; any free port if None.
    transports: kinds of connection that may be used. Workers of one host that both have unix sockets use no other; a
        group that lives on one host does not even listen on TCP then.
    reconnect_grace: seconds in which a TCP connection that has broken is made again, and goes on where it was, before
        its worker counts as lost; 0, at either end, turns it off. For so long a store is tried as well to which the
        connection has broken; with 0 once.
    max_unacknowledged_bytes: bytes that were sent over one TCP connection, and are kept until the other end has them;
        no more is sent then. At least 4 MiB.
    shared_memory: bytes of memory that may be shared with workers of this host, for large tensors; a quarter of the
        machine's, at most 4 GiB, by default; 0 turns it off.
    min_shared_bytes: shortest tensor that goes through shared memory by itself.
    min_bulk_bytes: shortest tensor that, without shared memory, goes in pieces over a second connection.
    """

    address: str | None = None
    bind_address: str | None = None
    port_range: tuple[int, int] | None = None
    transports: tuple[str, ...] = field(default=("unix", "tcp"))
    reconnect_grace: float = 20.0
    max_unacknowledged_bytes: int = 64 << 20
    shared_memory: int = field(default_factory=_quarter_of_memory)
    min_shared_bytes: int = SHARE_SIZE
    min_bulk_bytes: int = BULK_SIZE

    def _check(self) -> None:
        self._check_durations("reconnect_grace")
        self._check_integers("max_unacknowledged_bytes", "min_shared_bytes", "min_bulk_bytes")
        if self.max_unacknowledged_bytes < MIN_UNACKNOWLEDGED:
            raise RpcUsageError(
                f"max_unacknowledged_bytes must be at least {MIN_UNACKNOWLEDGED} (4 MiB), as less than that is "
                f"acknowledged too seldom, not {self.max_unacknowledged_bytes!r}"
            )
        _check_integer(self.shared_memory, "shared_memory", "a number of bytes", 0)
        if self.port_range is not None:
            ports = tuple(self.port_range) if isinstance(self.port_range, (tuple, list)) else ()
            if not (len(ports) == 2 and all(type(port) is int for port in ports) and 0 < ports[0] <= ports[1] < 65_536):
                raise RpcUsageError(f"port_range must be two ports, first <= last, not {_shown(self.port_range)}")
        for name in ("address", "bind_address"):
            _check_host(getattr(self, name), name)
        given = self.transports
        kinds = tuple(given) if isinstance(given, (tuple, list, set, frozenset)) else ()
        if not kinds or any(kind not in ("unix", "tcp") for kind in kinds):
            raise RpcUsageError(f"transports must name some of unix, tcp; not {_shown(given)}")
        self.transports = kinds


@dataclass(kw_only=True)
class SecurityOptions(_Group):
    """Which workers may join the group, and what members may do: ``RpcBackendOptions(security=...)``. Immutable.

    allow: what this worker runs for others; the verb `aiorpc.serve` offers them objects. Patterns for functions, such
        as ``"actors:step"`` or ``"actors:*"``, for resources, such as ``"queue/samples:put"``, and ``rpc.exposed`` for
        everything with that mark; one list for all callers, or a dict of lists by role, with ``"*"`` for all other
        roles. By default, and with ``"*"`` in place of a list, everything.
    serialization: ``free``: values are pickled, so a caller may run any code here. ``safe``: nothing is unpickled;
        plain values, containers, tensors, arrays, references, and objects of classes that were registered
        (`aiorpc.register_safe`); exceptions arrive as RemoteError. The same on all workers. `allow` is ``rpc.exposed``
        then, with all queues, published values and barriers, if it is not set.
    tls: files by which workers prove their identity; all TCP connections then use TLS 1.3, on all workers or on none.
        None takes the files that AIORPC_TLS_CERT, AIORPC_TLS_KEY and AIORPC_TLS_CA name, if they are set.
    secret_file: the file with the secret of the group, which only its owner may read, in place of AIORPC_SECRET. None
        takes the file that AIORPC_SECRET_FILE names, if it is set.
    require_secret: whether a worker needs AIORPC_SECRET to join. None: it does if members of the group, or the store
        where they meet, are on another host, in another container or of another user, and there are no certificates
        (`tls`) that bear the names of workers. False: the group's secret then goes through the store, and anyone who
        reaches the store may run code on all workers; with `tls` it does not, and any certificate of the authority will
        do. The same on all workers.
    authenticate_frames: whether all frames on TCP connections have an authentication code (a keyed hash over a counter
        and the bytes); a host in between can then end a connection but not change its bytes. The same on all workers.
        Costs large tensors over fast networks a tenth to a third of their speed. Unix sockets need none, and neither
        does TLS, which does the same.
    """

    allow: Allow = None
    serialization: str = "free"
    tls: Tls | None = None
    secret_file: str | os.PathLike[str] | None = None
    require_secret: bool | None = None
    authenticate_frames: bool = True

    def _check(self) -> None:
        if not isinstance(self.authenticate_frames, bool):
            raise RpcUsageError(f"authenticate_frames must be True or False, not {_shown(self.authenticate_frames)}")
        if self.require_secret is not None and not isinstance(self.require_secret, bool):
            raise RpcUsageError(f"require_secret must be True, False or None, not {_shown(self.require_secret)}")
        if self.secret_file is not None and not _is_path(self.secret_file):
            raise RpcUsageError(f"secret_file must be the path of a file or None, not {_shown(self.secret_file)}")
        if self.tls is not None and not isinstance(self.tls, Tls):
            raise RpcUsageError(f"tls must be a Tls (rpc.Tls(cert=, key=, ca=)) or None, not {_shown(self.tls)}")
        if self.serialization not in ("free", "safe"):
            raise RpcUsageError(f"serialization must be 'free' or 'safe', not {_shown(self.serialization)}")
        try:
            self.allow = frozen(self.allow)
        except RpcUsageError as error:
            text = str(error)
            raise RpcUsageError(text if text.startswith("allow") else f"allow: {text}") from None
        except Exception as error:  # of a value in it that cannot be shown
            raise RpcUsageError(f"allow is no rule that can be read: {foreign.said(error)}") from None


@dataclass(kw_only=True)
class RpcBackendOptions(LimitOptions, NetworkOptions, SecurityOptions):
    """Options of one worker. Read once, at init.

    limits, network, security: groups of options, each with a class of its own. An option of a group may be given by its
        own name as well, ``RpcBackendOptions(max_queued_calls=100)``, and is read and set by that:
        ``options.max_queued_calls``. RpcUsageError for an option that is given both ways.
    num_worker_threads: threads for ``def`` handlers that the calls of one worker may have; a thread that waits for a
        nested call does not count. Calls of other workers have some more, an eighth and at least one, because handlers
        may never return. With 1 there are no more: handlers run one after the other.
    rpc_timeout: the default timeout of calls, and of init, in seconds; 0 means no limit.
    init_method: where the workers meet: ``env://``, ``tcp://host:port`` or ``file:///path``.
    dedicated_loop: run the worker on a loop in a thread of its own, for programs whose steps block theirs.
    switch_interval: seconds for ``sys.setswitchinterval`` while the worker lives, unless that is shorter already: how
        long calls wait for the interpreter beside a thread that computes in Python; None leaves it alone.
    busy_wait: seconds a thread that blocks for an answer stays awake before it sleeps, letting others run, while its
        waits are no longer than that on average. The loop and a thread of handlers also stay awake after each message,
        for this time but at most 0.0002, if the next message usually comes so soon. 0 turns both off: less latency for
        the price of idle time.
    lag_warning: seconds the loop may be blocked before a warning names the handler; 0 turns it off.
    metrics: ``host:port`` where Prometheus reads the metrics of this worker by HTTP; port 0 for any free one. Workers
        of one process may have the same. None takes that of AIORPC_METRICS, if it is set; an empty one turns them off.
    stall_warning: seconds that calls made here may wait before the log says, once, what ``python -m aiorpc diagnose``
        would say of the group; 0, the default, turns it off. Streams, queues and the runtime's own calls do not count.
    shutdown_timeout: the default seconds that a graceful shutdown waits for the work of the others, as at the end of
        ``async with``; 0 means no limit.
    drain_on: names of signals at which this worker drains, if they have their default disposition when the worker has
        joined, in the main thread: SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU; ``()`` for none.
    drain_timeout: the default seconds of a drain; 0 means no limit. The signal ends a program that goes on for 4 s
        longer.
    newcomer_grace: in a free group, seconds for which calls to an unknown name wait for a worker of that name, counted
        from the first call; 0: they do not wait.
    device_maps: where tensors go, by the name of the callee and the device that they are on here: ``{"ps": {0: 1}}``;
        results come back the other way. A tensor on a device that the map leaves out is refused here; those of the cpu
        stay on the cpu if it is left out. One-to-one.
    devices: the CUDA devices that this worker uses; if empty, those that its own maps and those of others name.
    device_channel: how tensors travel between devices of two processes: ``ipc`` (memory of the device that both
        processes see), ``staging`` (through the host), or ``auto``: ipc where it works.
    device_buffer: bytes of device memory, for each peer and device, that tensors pass through with ipc; at least 4 MiB.
    traces: whether calls have spans of OpenTelemetry, of its global tracer provider. None: they do if AIORPC_TRACES is
        1.
    serve: the former name of `allow`, from before the first release; still accepted.
    """

    num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT
    init_method: str = "env://"
    dedicated_loop: bool = False
    switch_interval: float | None = 0.0005
    busy_wait: float = 0.004
    lag_warning: float = 1.0
    metrics: str | None = None
    stall_warning: float = 0.0
    shutdown_timeout: float = 0.0
    drain_on: Sequence[str] = ("SIGTERM",)
    drain_timeout: float = DRAIN_TIMEOUT
    newcomer_grace: float = 10.0
    device_maps: dict[str, dict[Device, Device]] = field(default_factory=dict)
    devices: list[Device] = field(default_factory=list)
    device_channel: str = "auto"
    device_buffer: int = 64 << 20
    traces: bool | None = None
    limits: InitVar[LimitOptions | None] = None
    network: InitVar[NetworkOptions | None] = None
    security: InitVar[SecurityOptions | None] = None
    serve: InitVar[Allow] = None

    def __setattr__(self, name: str, value: object) -> None:
        """Set an option. Raises RpcUsageError for an unknown name.

        A subclass with more options annotates them, as this class does.
        """
        if name in _GROUPS:
            raise RpcUsageError(f"{name} is given as options are made; set each of its options by its own name")
        if not name.startswith("_") and not hasattr(self, name):
            known = [each for made in type(self).__mro__ for each in inspect.get_annotations(made)]
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                meant = f"; did you mean {near[0]!r}?" if near else ""
                raise RpcUsageError(f"there is no option {_shown(name)}{meant}")
        object.__setattr__(self, name, value)

    def __post_init__(
        self,
        limits: LimitOptions | None,
        network: NetworkOptions | None,
        security: SecurityOptions | None,
        serve: Allow,
    ) -> None:
        if serve is not None:
            object.__setattr__(self, "allow", serve)  # `self.allow =` would look like a field of its own to checkers
        for name, group in (("limits", limits), ("network", network), ("security", security)):
            if group is not None:
                self._take(name, group)
        self._check_device_types()
        for device_map in (self.device_maps or {}).values():
            to_device_map(device_map)  # as in torch, a map that is given as a whole is one-to-one
        self._validate()

    def _take(self, name: str, group: _Group) -> None:
        """Take the given options of a group. The others may have been given by their own names."""
        kind = _GROUPS[name]
        if type(group) is not kind:
            raise RpcUsageError(f"{name} must be rpc.{kind.__name__}(...) or None, not {_shown(group)}")
        for option in sorted(group._given):
            if option in self._given:
                raise RpcUsageError(f"{option} is given twice: as {option}=, and in {name}=rpc.{kind.__name__}(...)")
            setattr(self, option, getattr(group, option))

    def _validate(self) -> None:
        """Raise RpcUsageError naming the first invalid option; DeviceMapError for devices and their maps.

        Brings options with several forms (a timedelta, a list) into the type of their fields.
        """
        for group in _GROUPS.values():
            group._check(self)
        self._check_integers("num_worker_threads")
        self._check_durations("rpc_timeout", "shutdown_timeout", "drain_timeout", "newcomer_grace", "busy_wait")
        self._check_signals()
        self._check_durations("lag_warning", "stall_warning")
        if self.switch_interval is not None:
            self._check_durations("switch_interval")
            if not self.switch_interval:
                raise RpcUsageError("switch_interval must be longer than 0 s, or None to leave the interpreter's alone")
        if not isinstance(self.dedicated_loop, bool):
            raise RpcUsageError(f"dedicated_loop must be True or False, not {_shown(self.dedicated_loop)}")
        if self.traces is not None and not isinstance(self.traces, bool):
            raise RpcUsageError(f"traces must be True, False or None, not {_shown(self.traces)}")
        if not isinstance(self.init_method, str):
            raise RpcUsageError(f"init_method must be a URL, not {_shown(self.init_method)}")
        if self.metrics is not None and (type(self.metrics) is not str or self.metrics):
            host_and_port(self.metrics, "metrics")
        self._validate_devices()

    def _check_signals(self) -> None:
        given: object = self.drain_on
        if not isinstance(given, (list, tuple)):
            raise RpcUsageError(f"drain_on must be a list of names of signals, not {_shown(given)}")
        for name in (names := tuple(given)):
            if type(name) is not str or name not in DRAINING_SIGNALS:
                raise RpcUsageError(
                    f"drain_on takes signals by which another process ends one: {', '.join(DRAINING_SIGNALS)}; and not "
                    f"{_shown(name)}"
                )
        self.drain_on = names

    def _check_device_types(self) -> None:
        """Raise RpcUsageError for options of a wrong type. torch's options take None for both."""
        maps: object = {} if self.device_maps is None else self.device_maps
        devices: object = self.devices
        if not isinstance(maps, Mapping):
            raise RpcUsageError(f"device_maps must be a dictionary by names of workers, not {_shown(maps)}")
        for name, device_map in maps.items():
            if not isinstance(device_map, Mapping):
                raise RpcUsageError(f"device_maps[{_shown(name)}] must be a dictionary, not {_shown(device_map)}")
        if isinstance(devices, str) or not isinstance(devices, Iterable | None):
            raise RpcUsageError(f"devices must be a list of devices, not {_shown(devices)}")

    def _validate_devices(self) -> None:
        self._check_device_types()
        self.device_maps = _as_set(to_device_maps({} if self.device_maps is None else self.device_maps))
        self.devices = [*to_devices([] if self.devices is None else self.devices)]
        if self.device_channel not in ("auto", "ipc", "staging"):
            raise RpcUsageError(f"device_channel must be auto, ipc or staging, not {_shown(self.device_channel)}")
        _check_integer(self.device_buffer, "device_buffer", "a number of bytes", MIN_DEVICE_BUFFER)

    def set_device_map(self, to: str, device_map: Mapping[Any, Device]) -> None:
        """Add to the map for worker `to`: tensors on each device (a key) go to the device there that is its value.

        May be called repeatedly. DeviceMapError, a ValueError, for a map that is not one-to-one or contradicts an
        earlier one; nothing has changed then. Init refuses a combined map that is not one-to-one.
        """
        extended = extend_device_map(self.device_maps.get(to, {}), device_map)
        self.device_maps.update(_as_set(to_device_maps({to: extended})))

    def set_devices(self, devices: Iterable[Device]) -> None:
        """Set the CUDA devices that this worker uses. DeviceMapError, a ValueError, for an invalid device."""
        self.devices = [*to_devices(devices)]

    def _device_claims(self, count: int, kind: str = "cuda") -> DeviceClaims:
        """The claims of a worker with `count` devices of a kind."""
        return DeviceClaims(count, tuple(to_devices(self.devices)), to_device_maps(self.device_maps), kind)

    def copy(self) -> RpcBackendOptions:
        """An independent, validated copy. Raises the errors of `_validate`."""
        self._check_device_types()
        made = copy.copy(self)
        made.device_maps = {name: dict(device_map) for name, device_map in (self.device_maps or {}).items()}
        made.devices = list(self.devices or ())
        made._validate()
        return made


_GROUPS: Mapping[str, type[_Group]] = MappingProxyType(
    {"limits": LimitOptions, "network": NetworkOptions, "security": SecurityOptions}
)
