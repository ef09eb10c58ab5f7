"""The devices of one worker: which of them calls use, on which streams, and device memory that other processes use.

A worker without devices, or without the hardware, has this object, too: tensors from another worker's device may be
sent to it, and answers may go to a device.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...channels import AnyBuffer
from ...channels.accelerator import Accelerator, DeviceBuffer
from ...channels.device import DIRECT, IPC, STAGING, Devices
from ...channels.device.outbox import BoxEnd, Inbox
from ...channels.landing import Arrival, Landing, StreamPool
from ...channels.routes import Route, Staying, going, returning
from ...devices import DeviceClaims, accelerator_kind, devices_used, to_device_map
from ...errors import DeviceMapError, WorkerClosed
from ...logs import logger
from ...options import RpcBackendOptions
from ...protocol.identity import WorkerRecord
from ...transport.connection import Connection
from ..engine.engine import Engine
from ..engine.host import provably_dead
from ..engine.pool import NoThread, ThreadPool
from ..engine.watch import ProcessWatch

# Threads that wait for devices, and for the driver.
_THREADS = 4
# Seconds in which the end of a process follows that of its connections.
_DEATH_PATIENCE = 2.0
# Seconds for which a leaving worker waits to see whether the processes die whose connections have ended.
_LAST_LOOK = 0.5
# Seconds between two checks whether others have closed our boxes.
_PAUSE = 0.005
# Seconds until a thread is asked for again after the system had none.
_NO_THREAD_PAUSE = 0.05


def claims_of(options: RpcBackendOptions, accelerator: Accelerator | None) -> DeviceClaims:
    """What a worker with these options and devices announces when it joins."""
    if accelerator is None:
        return options._device_claims(0, accelerator_kind())
    return options._device_claims(accelerator.count(), accelerator.kind)


class Accelerators:
    """The devices of one worker. On the loop, except where a method says otherwise."""

    def __init__(
        self, engine: Engine, accelerator: Accelerator | None, claims: DeviceClaims, *, as_torch: bool = False
    ) -> None:
        """claims: what this worker has announced of its devices. as_torch: errors have torch's words, too."""
        self.accelerator = accelerator
        self.claims = claims
        self._engine = engine
        self._as_torch = as_torch
        self._streams = None if accelerator is None else StreamPool(accelerator)
        self._used: list[int] = []
        self._threads = ThreadPool(f"{engine.name}-devices", _THREADS)
        self._retired: list[tuple[WorkerRecord, BoxEnd]] = []
        self._held: list[tuple[WorkerRecord, BoxEnd]] = []  # boxes that streams may wait for, until they are gone
        self._reasons: set[str] = set()
        self._watch: ProcessWatch | None = None
        self._channels: list[tuple[Devices, Connection]] = []  # of the links that are open

    async def start(self, claims: Mapping[str, DeviceClaims]) -> None:
        """The group is known, and with it the devices that calls use; they are initialized, which takes seconds."""
        self._use(devices_used(self._engine.name, claims))
        if self._used:
            await self._engine.steps.run(self._wake)
        self._watch = ProcessWatch(self._engine.loop, lambda record: self.collect())

    def _wake(self) -> None:
        """In a thread: let the driver make what it makes at the first use of a device."""
        driver = self.accelerator
        if driver is not None:
            for index in self._used:
                driver.mark(driver.fresh(index))

    def _use(self, devices: Sequence[torch.device]) -> None:
        self._used = sorted({*self._used, *(device.index for device in devices if device.index is not None)})

    # --- routes and streams, from any thread --------------------------------------------------------------------------

    def route_to(self, name: str) -> Route | None:
        """The route of calls to the worker of that name; None if tensors need not be looked at."""
        if self._stays(name):
            return self._staying() or None
        return going(self.accelerator, self.claims.maps.get(name, {}), name, as_torch=self._as_torch) or None

    def route_back(self, name: str, theirs: Mapping[str, object]) -> Route | None:
        """`route_to`, for answers to the worker of that name, which has opened the link with that descriptor."""
        if self._stays(name):
            return self._staying() or None
        return returning(self.accelerator, self._their_map(theirs), name, as_torch=self._as_torch) or None

    def comes_back(self, name: str, device: torch.device) -> bool:
        """Whether a tensor on that device of the worker of that name can come here without a copy on the host."""
        return self._stays(name) or device in self.claims.maps.get(name, {}).values()

    def _stays(self, name: str) -> bool:
        """Whether it is this worker, without a device map for itself."""
        return name == self._engine.name and name not in self.claims.maps

    def _staying(self) -> Staying:
        return Staying(self.accelerator, self._engine.name, self._use_index)

    def _use_index(self, index: int) -> None:
        """Any thread; a tensor lies there, so the device is initialized."""
        if index not in self._used:
            self._used = sorted({*self._used, index})

    def land(self) -> Landing | None:
        """Streams for a message that brings tensors to devices: one for each device that calls use."""
        driver = self.accelerator
        return None if driver is None else Landing(driver, self._streams, self._used)

    def landing(self) -> Landing | None:
        """A landing on the current streams, for a message that may bring tensors from a host to devices here."""
        return None if self.accelerator is None else Landing(self.accelerator)

    def arrival(self, value: object = None) -> Arrival | None:
        """What users of a value wait for that this thread has just made: the work given to all its current streams.

        The tensors in it, in containers and in modules, are kept for the streams that they are used on.
        """
        driver = self.accelerator
        if driver is None or not self._used:
            return None
        carriers = [
            (tensor.device.index, driver.carrier(tensor)) for tensor in tensors_in(value) if driver.holds(tensor)
        ]
        return Arrival(driver, [(index, driver.mark(driver.current(index))) for index in self._used], carriers)

    def settled(self, buffers: Sequence[AnyBuffer]) -> Sequence[AnyBuffer]:
        """The same buffers, for sending later or by another thread: those on devices are cloned on current streams."""
        if DeviceBuffer not in map(type, buffers):
            return buffers
        return [self._clone(buffer) if isinstance(buffer, DeviceBuffer) else buffer for buffer in buffers]

    def _clone(self, buffer: DeviceBuffer) -> DeviceBuffer:
        driver = self.accelerator
        assert driver is not None, "no buffer lies on a device without it"
        if buffer.ready is not None:
            return buffer
        stream = driver.current(buffer.index)
        carrier = driver.empty(len(buffer), buffer.index)
        driver.move(carrier, buffer.carrier, stream)
        return replace(buffer, carrier=carrier, ready=driver.mark(stream))

    def in_background(self, fn: Callable[..., None], *args: object) -> None:
        """Run something that may wait for a device, in a thread. Any thread; does nothing once the worker closes."""
        try:
            self._threads.submit(fn, *args)
        except NoThread as error:  # the loop must not wait for a device, and others wait for this
            logger.debug("tried again later: %s", error)
            self._engine.call_on_loop(self._engine.loop.call_later, _NO_THREAD_PAUSE, self.in_background, fn, *args)
        except WorkerClosed:
            logger.debug("left out, as the worker leaves: %r", fn)

    # --- what the two ends of a link announce -------------------------------------------------------------------------

    def descriptor(self, name: str, *, opener: bool) -> dict[str, object]:
        """For the worker of that name: what it needs to know of the devices here, and the opener's map."""
        made: dict[str, object] = {"obstacle": self._obstacle()}
        if opener:
            made["map"] = {str(a): str(b) for a, b in self.claims.maps.get(name, {}).items()}
        return made

    def _obstacle(self) -> str:
        """Why device memory of this process cannot be shared; empty if it can."""
        if self.accelerator is None:
            return "it has no devices"
        shared = self.accelerator.interprocess
        if shared is None:
            return f"{self.accelerator.kind} devices share no memory between processes"
        return next((reason for index in self._used if (reason := shared.obstacle(index))), "")

    def _their_map(self, theirs: Mapping[str, Any]) -> dict[torch.device, torch.device]:
        """The opener's map to us, from its descriptor; devices here that are new in it are used from now on."""
        try:
            device_map = to_device_map(theirs.get("map") or {})
        except DeviceMapError as error:
            logger.warning("an invalid device map: %s", error)
            return {}
        # A device that does not exist here fails the messages for it alone.
        before = list(self._used)
        self._use([device for device in device_map.values() if device.type != "cpu" and self.claims.has(device)])
        if self._used != before:
            self.in_background(self._wake)
        return device_map

    def way(self, record: WorkerRecord) -> str:
        """The way to that worker if it is settled without asking it; empty: see `choose`."""
        wanted = self._engine.options.device_channel
        here = record.host == self._engine.record.host
        if wanted == STAGING:
            return STAGING
        if here and record.pid == os.getpid():
            return DIRECT
        return "" if here or wanted == IPC else STAGING

    def choose(self, record: WorkerRecord, theirs: Mapping[str, object]) -> tuple[str, str]:
        """ipc or staging, and why not ipc, as far as the descriptors show."""
        reason = self._obstacle() or str(theirs.get("obstacle", "it says nothing of devices"))
        if record.host != self._engine.record.host:
            reason = "it is on another host, or of another user"
        return (STAGING, reason) if reason else (IPC, "")

    def on_chosen(self, record: WorkerRecord, way: str, reason: str) -> None:
        """Log the way, once for each worker and reason."""
        if self.accelerator is None or not self._used:
            return
        text = f"tensors on devices go to {record.describe()} by {way}" + (f": {reason}" if reason else "")
        if text not in self._reasons:
            self._reasons.add(text)
            logger.info("%s", text)

    # --- memory that other processes use ------------------------------------------------------------------------------

    def ended(self, record: WorkerRecord, boxes: Sequence[BoxEnd]) -> None:
        """A link has ended. The worker at its other end may still be reading the outboxes among these.

        Or it is dying: its connection ends before its process does. Closing an inbox waits for copies out of it, which
        may wait for what a dead process recorded; it is therefore put off until the worker's fate is known.
        """
        if not boxes:
            return
        self._retired += [(record, box) for box in boxes]
        self.hold(record, boxes)
        self.collect()
        if self._retired and self._watch is not None and record.pid != os.getpid():
            self._engine.loop.call_later(_DEATH_PATIENCE, self._close_inboxes)

    def hold(self, record: WorkerRecord, boxes: Sequence[BoxEnd]) -> None:
        """Streams here may wait for what that worker's process has recorded in these: end the waits if it dies."""
        self._held = [each for each in self._held if not each[1].gone]
        self._held += [(record, box) for box in boxes]
        if boxes and self._watch is not None and record.pid != os.getpid():
            self._watch.add(record)

    def _release(self) -> bool:
        """End the waits for dead processes; returns whether there are boxes of living ones."""
        living = False
        for record, box in self._held:
            if provably_dead(record, self._engine.record.host):
                box.release_waiters()  # may be repeated: a dying process may still record something
            elif not box.gone:
                living = True
        return living

    def _close_inboxes(self) -> None:
        """Close the inboxes from workers that live on, which will do what they have recorded."""
        for record, box in self._retired:
            if isinstance(box, Inbox):
                self.in_background(self._let_go, record, box)
        self._retired = [each for each in self._retired if not isinstance(each[1], Inbox)]

    def collect(self) -> None:
        """Free memory that only dead processes could still use."""
        self._release()  # first: threads that free memory wait for streams, which may wait for these processes
        retired, self._retired = self._retired, []
        for record, box in retired:
            if provably_dead(record, self._engine.record.host):
                self.in_background(self._let_go, record, box)
            else:
                self._retired.append((record, box))

    def _let_go(self, record: WorkerRecord, box: BoxEnd) -> None:
        """In a thread."""
        try:
            box.close()
        except RuntimeError as error:
            logger.debug("letting go of device memory shared with %s: %s", record.describe(), error)

    def buffers(self) -> dict[int, int]:
        """Bytes of memory that tensors to other processes pass through, for each device that calls use. Any thread."""
        found = dict.fromkeys(self._used, 0)
        for channel, _ in self._channels:
            for index, size in channel.memory():
                found[index] = found.get(index, 0) + size
        return found

    def add(self, channel: Devices, connection: Connection) -> None:
        """A link over that connection has this end of the device channel."""
        self._channels = [each for each in self._channels if not each[1].ended]
        self._channels.append((channel, connection))

    async def let_go(self, limit: float) -> None:
        """The worker leaves: close what it has opened, and wait until the others have closed its boxes.

        Waits at most `limit` seconds. What the others still have open then is freed when this process ends.
        """
        channels = [each for each in self._channels if not each[1].ended and (each[0].opened or each[0].boxes)]
        for channel, _ in channels:
            self.in_background(channel.let_go)
        end = time.monotonic() + limit
        while time.monotonic() < end:
            if not any(channel.shared and not connection.ended for channel, connection in channels):
                break
            await asyncio.sleep(_PAUSE)

    async def close(self, limit: float) -> None:
        """End the waits for devices. Waits at most `limit` seconds for the threads that are in one."""
        end = time.monotonic() + min(limit, _LAST_LOOK)
        while self._release() and time.monotonic() < end:  # noqa: ASYNC110  # a process ends later than its connections
            await asyncio.sleep(_PAUSE)
        if self._watch is not None:
            self._watch.close()
        if self._threads.threads:
            await self._engine.steps.run(lambda: self._threads.close(limit))
        else:
            self._threads.close(0.0)

    def close_in_child(self) -> None:
        """In a forked child: let go of everything; it belongs to the parent."""
        if self._watch is not None:
            self._watch.close_in_child()


def tensors_in(value: object, depth: int = 4) -> Iterator[torch.Tensor]:
    """The tensors in a value, in its containers and in modules."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from itertools.chain(value.parameters(), value.buffers())
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif depth and isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from tensors_in(item, depth - 1)
