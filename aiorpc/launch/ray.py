"""Workers as actors of Ray, joined to one free group.

    from aiorpc.launch import ray as on_ray

    async with on_ray.start("actor{rank}", workers=4, num_gpus=1, max_restarts=3) as group:
        print(await rpc.call("actor0", function, 1))

The program that starts them, Ray's driver, is a member of the group, too. It hosts the store, so no actor's death takes
that along. It makes the secret of the group and hands it to the actors as an argument, which Ray carries; it stands in
no environment and on no command line. Ray ends the actors when their driver ends.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self

from .. import sync
from ..errors import RendezvousError, RpcUsageError, StoreGone
from ..logs import logger
from ..options import RpcBackendOptions, seconds
from ..protocol.identity import check_name
from ..rights import check_role
from ..runtime.meeting.meeting_place import MeetingPlace
from ..runtime.meeting.secret import Secret, given_secret
from ..runtime.meeting.stores import serve
from ..undoing import on_error
from ..worker import Worker

__all__ = ["Invitation", "RayGroup", "start"]

#: The name and the role of the worker of the program that starts a group.
DRIVER = "driver"
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
#: Options of Ray's actors that this module sets itself.
_OURS = (
    "lifetime",
    "max_concurrency",
    "max_task_retries",
    "name",
    "namespace",
    "placement_group",
    "placement_group_bundle_index",
    "scheduling_strategy",
)
_LOOK = 0.5  # seconds between two looks whether waiting was given up
_AGAIN = 1.0  # seconds until an actor tries again to take the place of its former process
_RETURNING = 5.0  # seconds at most for `serve` to return once its worker has left
_SHOWN = 400  # characters of what Ray says of an actor that has ended


@dataclass(frozen=True)
class Invitation:
    """What lets other actors and tasks of the same Ray cluster join: pass them `RayGroup.invitation` as an argument.

    It can be pickled, and has the secret of the group, which `repr` does not show: with it a process is a member.
    place: where members meet, a URL.
    """

    place: str
    _secret: bytes = field(repr=False)
    _options: RpcBackendOptions = field(repr=False)

    def init(self, name: str, *, role: str = "") -> Worker:
        """A worker that joins the group as `aiorpc.init` does: ``async with invitation.init("trainer0"):``.

        Its options are those of the group, without ``devices`` and ``device_maps``. Others reach it at the address that
        Ray has of its node.

        Raised here: RpcUsageError for an invalid name or role, and where Ray is not installed. Raised by joining: see
        `aiorpc.init`.
        """
        return self._worker(name, role, devices=False)

    def _worker(self, name: str, role: str, *, devices: bool) -> Worker:
        options = self._options.copy()
        if not devices:
            options.devices, options.device_maps = [], {}
        options.init_method = self.place
        options.address = _ray().util.get_node_ip_address()
        return Worker(name, options=options, role=role, secret=Secret(self._secret))


@dataclass(frozen=True)
class _Wanted:
    """What `start` was asked for."""

    names: Sequence[str]
    strategy: str
    setup: Callable[[], object] | None
    options: RpcBackendOptions
    role: str
    timeout: float
    actor: Mapping[str, Any]

    @property
    def bundle(self) -> dict[str, float]:
        """What each actor needs, as Ray's placement groups have it."""
        given = {"CPU": self.actor["num_cpus"], "GPU": self.actor.get("num_gpus"), "memory": self.actor.get("memory")}
        return {name: each for name, each in (given | dict(self.actor.get("resources") or {})).items() if each}


def start(
    name: str = "worker{rank}",
    *,
    workers: int,
    strategy: str = "PACK",
    setup: Callable[[], object] | None = None,
    options: RpcBackendOptions | None = None,
    role: str = "",
    timeout: float = 120.0,
    **actor: Any,
) -> RayGroup:
    """A group of so many workers, each an actor of Ray, for ``async with`` or, in a script without a loop, ``with``.

    The block begins when all have joined, and this program, as the worker ``driver`` with the role ``driver``. It is
    the current worker there; with ``with`` it is that of `aiorpc.init_rpc`, so the blocking verbs work. At the end of
    the block the workers finish what they accepted and leave; if it raises they leave at once. Then the actors and
    their placement group are removed.

    name: of each worker, with ``{rank}`` for its number from 0 on, and ``{role}`` for the role.
    strategy: how Ray places the actors on nodes: ``PACK``, ``SPREAD``, ``STRICT_PACK`` or ``STRICT_SPREAD``.
    setup: called without arguments in each actor once its worker has joined, also after a restart, in a thread, or on
        the worker's loop if it is a coroutine function. There `aiorpc.current` is that worker. `start` waits for it.
    options: for all members. The driver has them without ``devices`` and ``device_maps``. ``init_method`` and
        ``address`` are set here.
    role: of the workers; see `aiorpc.init`.
    timeout: seconds for Ray to find room for all actors, and for all of them to join. At the end of the block that many
        for them to leave.
    actor: options of Ray's actors: ``num_cpus`` (1), ``num_gpus``, ``resources``, ``memory``, ``max_restarts`` (0),
        ``runtime_env`` and others, for each of them.

    An actor whose process or node ends is started again by Ray up to ``max_restarts`` times, where there is room. It
    joins again under its name, as a new member. The secret is AIORPC_SECRET or that of ``secret_file``, if this program
    has one, else a new one.

    Raised here: RpcUsageError for invalid arguments. Raised by entering: RpcUsageError if Ray is not installed, or is
    reached by its client (``ray://``), whose program is no node of the cluster; RendezvousError if there is no room, or
    if a worker cannot join or its `setup` raises, with its name and error. Nothing is left behind then. If Ray does not
    run in this process yet, entering calls ``ray.init()``.
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise RpcUsageError(f"workers must be a number of workers >= 1, not {workers!r:.80}")
    if strategy not in STRATEGIES:
        raise RpcUsageError(f"strategy must be one of {', '.join(STRATEGIES)}, not {strategy!r:.80}")
    if setup is not None and not callable(setup):
        raise RpcUsageError(f"setup must be a function without arguments, or None, not {setup!r:.80}")
    if options is not None and not isinstance(options, RpcBackendOptions):
        raise RpcUsageError(f"options must be an RpcBackendOptions or None, not {options!r:.80}")
    ours = [each for each in _OURS if each in actor]
    if ours:
        raise RpcUsageError(f"{', '.join(ours)}: aiorpc sets this option of Ray's actors itself; leave it out")
    chosen = (options or RpcBackendOptions()).copy()
    names, limit = _names(name, workers, check_role(role)), seconds(timeout, "timeout")
    if not limit:
        raise RpcUsageError("timeout must be longer than 0 s: Ray may wait for room without end")
    wanted = _Wanted(names, strategy, setup, chosen, role, limit, {"num_cpus": 1} | actor)
    if not wanted.bundle:
        raise RpcUsageError("num_cpus, num_gpus and resources are all 0: Ray places an actor by what it needs")
    return RayGroup(wanted)


def _names(pattern: str, workers: int, role: str) -> list[str]:
    try:
        names = [check_name(pattern.format(rank=rank, role=role)) for rank in range(workers)]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise RpcUsageError(
            f"name may have {{rank}} and {{role}} in braces, and no more, not {pattern!r:.80}"
        ) from error
    if len({*names, DRIVER}) <= workers:
        raise RpcUsageError(
            f"name must make a name of its own for each worker, and none may be {DRIVER!r}, which this program has: "
            f"write {{rank}} in it, not {pattern!r}"
        )
    return names


def _ray() -> Any:
    """Ray's module. RpcUsageError if it is not installed."""
    try:
        import ray
        import ray.util.client
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise RpcUsageError(
            f"aiorpc.launch.ray needs Ray ({error}): pip install 'aiorpc-torch[ray]', on all nodes"
        ) from error
    return ray


class RayGroup:
    """The workers that `start` has started. Given by the ``async with`` or ``with`` block.

    names: of the workers, by rank. worker: that of this program. lost: workers whose actors Ray does not start again,
    as ``max_restarts`` is used up or their setup failed, and why; the log has that as an error. Until then a worker
    that has died is started anew: wait for it with `aiorpc.wait_for`.
    """

    worker: Worker

    def __init__(self, wanted: _Wanted) -> None:
        self.names: list[str] = [*wanted.names]
        self.lost: dict[str, str] = {}
        self._wanted = wanted
        self._invitation: Invitation | None = None
        self._store: object = None
        self._room: Any = None  # the placement group
        self._actors: dict[str, Any] = {}
        self._serving: list[Any] = []  # what their `serve` will return
        self._ending = threading.Event()

    @property
    def invitation(self) -> Invitation:
        """For other actors and tasks that want to join. RpcUsageError outside of the block."""
        if self._invitation is None:
            raise RpcUsageError("the group has not been started: use it inside of its `async with` or `with` block")
        return self._invitation

    def __repr__(self) -> str:
        return f"<aiorpc.launch.ray.RayGroup of {len(self.names)} workers, {self.names[0]!r}...>"

    async def __aenter__(self) -> Self:
        """Start the actors, on the running loop."""
        await asyncio.to_thread(self._open)
        try:
            await self.worker.__aenter__()
            await self._to_the_end(self._launch)
            await asyncio.gather(*(self.worker.wait_for(name, timeout=self._wanted.timeout) for name in self.names))
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Let the workers leave, and remove the actors."""
        try:
            await self._to_the_end(partial(self._end_actors, graceful=error is None))
        finally:
            try:
                await self.worker.__aexit__(kind, error, traceback)
            finally:
                self._close()

    def __enter__(self) -> Self:
        """Start the actors; blocks."""
        self._open()
        with on_error(self._close):
            sync.host(self.worker)
        with on_error(self.__exit__, BaseException):
            self._launch()
            for name in self.names:
                self.worker.wait_for(name, timeout=self._wanted.timeout).wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let the workers leave, and remove the actors."""
        try:
            self._end_actors(graceful=kind is None)
        finally:
            try:
                sync.shutdown(graceful=kind is None)
            finally:
                self._close()

    async def _to_the_end(self, step: Callable[[], None]) -> None:
        """Run a step in a thread. A step that is cancelled is told so, and ends before this does."""
        running = asyncio.ensure_future(asyncio.to_thread(step))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            self._ending.set()
            await asyncio.wait([running])
            if not running.cancelled():
                running.exception()  # seen
            raise

    def _open(self) -> None:
        """Host the store, and make the driver's worker. Blocks."""
        if self._invitation is not None:
            raise RpcUsageError("this group was started before: call `start` for another one")
        ray = _ray()
        if not ray.is_initialized():
            ray.init()
        if ray.util.client.ray.is_connected():
            raise RpcUsageError(
                "this program is a client of Ray (ray://), and the cluster cannot call it: run it on a node of the "
                "cluster, for example by `ray job submit`"
            )
        options = self._wanted.options.copy()
        secret = given_secret(options.secret_file)
        options.secret_file = None  # the actors have it from here
        host = ray.util.get_node_ip_address()
        self._store, port = serve(host, 0)
        place = str(MeetingPlace(None, None, host=host, port=port))
        chosen = secrets.token_bytes(32) if secret is None else bytes(secret)
        self._invitation = Invitation(place, chosen, options)
        self.worker = self._invitation.init(DRIVER, role=DRIVER)

    def _launch(self) -> None:
        """Start the actors and wait until all have joined. Blocks."""
        ray, wanted, until = _ray(), self._wanted, time.monotonic() + self._wanted.timeout
        try:
            make = partial(ray.remote(RayMember).options, **wanted.actor, max_concurrency=2, max_task_retries=-1)
            make()
        except (TypeError, ValueError) as error:
            raise RpcUsageError(f"Ray does not take these options for an actor: {error}") from error
        self._find_room(until)
        for number, name in enumerate(self.names):
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._room, number)
            self._actors[name] = make(scheduling_strategy=strategy).remote(
                name, wanted.role, self.invitation, wanted.setup, wanted.timeout
            )
        coming = {actor.joined.remote(): name for name, actor in self._actors.items()}
        while coming and not self._ending.is_set():
            here, _ = ray.wait([*coming], timeout=_LOOK)
            for each in here:
                name = coming.pop(each)
                try:
                    ray.get(each)
                except ray.exceptions.RayError as error:
                    raise RendezvousError(f"worker {name!r} cannot join: {_said(error)}") from error
            if coming and time.monotonic() > until:
                raise RendezvousError(
                    f"{', '.join(coming.values())} of {len(self.names)} workers have not joined within "
                    f"{wanted.timeout:g} s, though Ray has room for their actors: `ray list actors` and `ray logs` "
                    "show what these do; a `setup` that takes longer needs a longer timeout="
                )
        for name, actor in self._actors.items():
            self._serving.append(served := actor.serve.remote())
            served.future().add_done_callback(partial(self._on_end, name))

    def _find_room(self, until: float) -> None:
        ray, bundle = _ray(), self._wanted.bundle
        self._room = ray.util.placement_group([bundle] * len(self.names), strategy=self._wanted.strategy)
        while not self._ending.is_set() and not self._room.wait(_LOOK):
            if time.monotonic() > until:
                raise RendezvousError(
                    f"Ray has found no room for {len(self.names)} workers with {_amounts(bundle, bundle)} each "
                    f"(strategy {self._wanted.strategy}) within {self._wanted.timeout:g} s. Its nodes have "
                    f"{_amounts(ray.cluster_resources(), bundle)} in all, of which "
                    f"{_amounts(ray.available_resources(), bundle)} are free: ask for less, add nodes, or give a "
                    "longer timeout= where nodes are added on demand (`ray status`)"
                )

    def _on_end(self, name: str, ended: concurrent.futures.Future[None]) -> None:
        """Ray will not start this actor again, or the group ends. In a thread of Ray's."""
        if not self._ending.is_set() and not ended.cancelled() and (error := ended.exception()) is not None:
            self.lost[name] = _said(error)
            logger.of(self.worker.name).error("worker %s is not started again: %s", name, self.lost[name])

    def _end_actors(self, *, graceful: bool) -> None:
        """Let the workers leave, then remove actors and placement group. Blocks, for no longer than the timeout."""
        ray = _ray()
        self._ending.set()
        try:
            leaving = [actor.leave.options(max_task_retries=0).remote(graceful) for actor in self._actors.values()]
            if leaving:
                ray.wait(leaving, num_returns=len(leaving), timeout=self._wanted.timeout)
            if self._serving:  # it returns as well: Ray prints an error for a call that `ray.kill` ends
                ray.wait(self._serving, num_returns=len(self._serving), timeout=_RETURNING)
        finally:
            for actor in self._actors.values():
                ray.kill(actor, no_restart=True)
            self._actors.clear()
            self._serving.clear()
            if self._room is not None:
                ray.util.remove_placement_group(self._room)
                self._room = None

    def _close(self) -> None:
        self._store = None  # its server ends with it


class RayMember:
    """An actor of Ray that is a worker of a group. Ray calls the methods from threads, and makes the object anew, with
    the same arguments, when the actor's process has ended.
    """

    def __init__(
        self, name: str, role: str, invitation: Invitation, setup: Callable[[], object] | None, timeout: float
    ) -> None:
        self._name = name
        self._over = threading.Event()
        worker = self._join(role, invitation, time.monotonic() + timeout)
        if setup is not None:
            with on_error(sync.shutdown, False):
                if inspect.iscoroutinefunction(setup):
                    asyncio.run_coroutine_threadsafe(setup(), worker.loop).result()
                else:
                    setup()

    def __repr__(self) -> str:
        """Stands before the lines of its log that Ray shows."""
        return self._name

    def _join(self, role: str, invitation: Invitation, until: float) -> Worker:
        """Join. After a restart others may not know yet that the former process is lost: then the name is taken."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray warns of a name of its own that this uses
            again = _ray().get_runtime_context().was_current_actor_reconstructed
        while True:
            try:
                worker = invitation._worker(self._name, role, devices=True)
                sync.host(worker)
                return worker
            except StoreGone:
                raise
            except RendezvousError as error:
                if not again or time.monotonic() > until:
                    raise
                logger.info("worker %s tries again to take its place: %s", self._name, error)
                time.sleep(_AGAIN)

    def joined(self) -> None:
        """Return: Ray calls it when the object was made."""

    def serve(self) -> None:
        """Return when the worker has left. Ray calls it again after each restart, so it fails with the last one."""
        self._over.wait()

    def leave(self, graceful: bool) -> None:
        """Let the worker leave the group."""
        try:
            sync.shutdown(graceful)
        finally:
            self._over.set()


def _said(error: BaseException) -> str:
    """What an error of Ray says, in one line: of one that the actor raised its last line, which has that error."""
    text = str(error).strip()
    if "error raised in its creation task" in text:
        text = text.splitlines()[-1]
    return " ".join(text.split())[:_SHOWN]


def _amounts(amounts: Mapping[str, float], names: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amounts.get(name, 0):g}" for name in names)
