"""A member with a client of its own: it has joined as all do, and from then on says whatever it likes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from aiorpc import Worker
from aiorpc.autograd import contexts, parts, wire
from aiorpc.channels import shared_messages
from aiorpc.channels.device import messages as device_messages
from aiorpc.protocol import messages, publication
from aiorpc.protocol.frames import Frame, Kind, encode_frame
from aiorpc.protocol.messages import ByName, Call, Fetch, Method, ObjectMethod, Parcel, Values
from aiorpc.protocol.packing import pack
from aiorpc.protocol.reference_messages import MESSAGES as REFERENCES
from aiorpc.protocol.reference_messages import PassedReference, ReferenceId
from aiorpc.queues.packing import hand_over
from aiorpc.queues.served import ServedQueue
from aiorpc.runtime.calls.functions import find_name
from aiorpc.runtime.fanout.barriers import come_to_barrier
from aiorpc.runtime.gradients.reach import SentName
from aiorpc.runtime.group import group
from aiorpc.runtime.links import messages as link_messages
from aiorpc.runtime.publication import handlers
from aiorpc.transport.connection import Connection

# Handlers of the runtime, which serve everybody.
HANDLERS: Sequence[Any] = (
    *(group.attend, group.arrive, group.introduce, group.report_lost, group.vouch, group.present, group.poll),
    *(handlers.leased, handlers.unpublished, handlers.wanted, handlers.pieced, handlers.leave, handlers.latest),
    *(handlers.digest, handlers.arrived, handlers.fetching),
    *(handlers.released, handlers.ended, hand_over, come_to_barrier, contexts.forget, contexts.has_ended),
    *(parts.gather, parts.plan, parts.go_on, parts.take, parts.abort),
)
QUEUE_METHODS = sorted(name for name, each in vars(ServedQueue).items() if callable(each) and name[0] != "_")
PUBLICATION = publication.MESSAGES
NAMES = (
    "builtins:len",
    "operator:add",
    "time:sleep",
    "tests.runtime.bad_member:numbers",
    "no.such:thing",
    "",
    ":",
    "x",
)
EXTREMES = (0, 1, 2, 3, 7, 255, 65_535, 1 << 31, 1 << 40, (1 << 62) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -2)
ODD: Sequence[Any] = (
    None,
    True,
    "",
    "x",
    b"",
    b"\xc1",
    1.5,
    float("nan"),
    float("inf"),
    -float("inf"),
    [],
    {},
    [[]],
    [None] * 3,
)


def numbers(count: int) -> Any:
    """A generator function."""
    yield from range(count)


class BadMember:
    """See the module. Its own runtime hears nothing any more; what it says next follows from the seed.

    victims: the workers that it is connected with, both ways. tame: whether it says little for which the others break
    with it at once, so that it gets far.
    """

    def __init__(self, worker: Worker, victims: Sequence[Worker], seed: int) -> None:
        self.chance = random.Random(seed)
        self.tame = seed % 4 != 0
        self.worker = worker
        self.victims = victims
        self.heard: list[Frame] = []
        self._calls = {
            victim: connection
            for victim in victims
            if (connection := worker._node.peers.find(victim.name).connection) is not None
        }
        self._serves = {
            next(victim for victim in victims if victim.name == service.record.name): service.connection
            for service in worker._node.services
            if service.record.name != worker.name
        }
        for connection in (*self._calls.values(), *self._serves.values()):
            connection.on_frames = self._hear
            connection.on_stood = connection.takes = None
        self._next = 1 << 32

    def _hear(self, frames: list[Frame]) -> None:
        self.heard = [*self.heard, *frames][-200:]

    def step(self) -> None:
        """Say something to somebody."""
        victim = self.chance.choice(self.victims)
        calls, serves = self._calls[victim], self._serves[victim]
        either = self.chance.choice((calls, serves))
        wild = 0 if self.tame else 1
        said: list[tuple[int, Callable[[], None]]] = [
            (8, lambda: self._send(calls, Kind.CALL, self._new_id(), self._call())),
            (2 * wild, lambda: self._send(calls, Kind.CALL, self._id(), self._call())),
            (2, lambda: self._use_again(calls)),
            (8, lambda: self._ask_runtime(calls)),
            (4, lambda: self._send(calls, Kind.CANCEL, self._id(), [self.chance.random() < 0.5])),
            (3, lambda: self._send(calls, Kind.CREDIT, self._id(), [self.chance.choice((0, 1, 5))])),
            (4 + 4 * wild, lambda: self._send(calls, Kind.REFERENCE, 0, self._reference())),
            (2 * wild, lambda: self._send(calls, Kind.RELEASE, 0, [[[self._int() for _ in range(4)]]])),
            (2 * wild, lambda: self._send(calls, Kind.CHUNK, self._id(), self._chunk(), self._segments())),
            (3 * wild, lambda: self._send(either, Kind.CHANNEL, self._id(), self._channel(), self._segments())),
            (3 * wild, lambda: self._send(either, Kind.PARCEL, self._id(), self._parcel(), self._segments())),
            (2, lambda: self._send(either, Kind.PARCEL, self._new_id(), self._parcel_to_come())),
            (8, lambda: self._send(serves, self.chance.choice((Kind.REPLY, Kind.ITEM)), self._id(), [self._values()])),
            (4, lambda: self._send(serves, Kind.ERROR, self._id(), self._error())),
            (8, lambda: self._answer(serves)),
            (wild, lambda: self._send(either, self.chance.choice([*Kind]), self._id(), self._odd(2))),
            (wild, lambda: self._send(either, self._int() % 256, self._id(), self._odd(2))),
            (wild, lambda: self._send_raw(either, self.chance.randbytes(self.chance.randrange(60)))),
            (1, either.pause),
            (1, either.resume),
            (wild, lambda: self._send(either, Kind.GOODBYE, 0, b"\x91\xa0")),
        ]
        weights, steps = zip(*said, strict=True)
        self.chance.choices(steps, weights)[0]()

    # --- what is sent -------------------------------------------------------------------------------------------------

    def _send(self, connection: Connection, kind: int, call_id: int, said: Any, segments: Sequence[bytes] = ()) -> None:
        """A message, sometimes broken: truncated, with something behind it, or with a field that is another one."""
        if type(said) is not bytes:
            if isinstance(said, tuple | list) and said and self.chance.random() < 0.08 and not self.tame:
                said = [*said]
                said[self.chance.randrange(len(said))] = self._anything()
            try:
                said = pack(said)
            except (OverflowError, TypeError, ValueError):
                return
        if self.chance.random() < 0.02 and not self.tame:
            said = said[: self.chance.randrange(len(said) + 1)] + self.chance.randbytes(self.chance.randrange(3))
        self._send_raw(connection, b"".join(map(bytes, encode_frame(kind, call_id, said, segments))))

    def _send_raw(self, connection: Connection, data: bytes) -> None:
        connection.send([data], urgent=True)

    # --- by the caller ------------------------------------------------------------------------------------------------

    def _call(self) -> Call:
        maybe = self._maybe
        function = self.chance.choice(
            (
                *(ByName(self.chance.randrange(1 << 20), name) for name in NAMES),
                *(self._int() % (1 << 63), Fetch(*self._reference_id()), Method(*self._reference_id(), "upper")),
                *(ObjectMethod("open", self.chance.choice(QUEUE_METHODS)), ObjectMethod("nobody", "x"), None),
            )
        )
        arguments = self._values()
        names = maybe(0.05, ["a", "b"][: self.chance.randrange(3)])
        remaining = maybe(0.2, self.chance.choice((0.0, 1e-9, 0.5, -1.0, 1e300, float("nan"), float("inf"))))
        credit = maybe(0.2, self.chance.choice((0, 1, 16, -5, 1 << 40)))
        creates = maybe(0.1, ReferenceId(*self._own_id()) if self.tame else self._reference_id())
        once = maybe(0.1, (self._int() % (1 << 63), self._int() % (1 << 63)))
        once = None if credit is not None or creates is not None else once
        origin, context = maybe(0.1, (0, self._int() % (1 << 63))), maybe(0.3, self._context())
        return Call(function, arguments, names, remaining, origin, context, credit, creates, once)

    def _use_again(self, connection: Connection) -> None:
        """A number that was given up, for another call."""
        number, call = (
            self._new_id(),
            Call(ByName(1 << 21, "builtins:int"), values_of(["x"])),
        )
        for _ in range(3):
            self._send(connection, Kind.CALL, number, call)
            self._send(connection, Kind.CANCEL, number, [False])
        self._send(connection, Kind.CALL, number, self._call())

    def _ask_runtime(self, connection: Connection) -> None:
        """Call a handler that serves everybody, with arguments that are often nearly right."""
        function = self.chance.choice(HANDLERS)
        arguments: list[Any] = []
        if function in (group.attend, group.arrive, group.introduce, group.report_lost):
            record = self.chance.choice((self.worker, *self.victims))._node.engine.record.to_wire()
            if self.chance.random() < 0.5:
                record[self.chance.randrange(len(record))] = self._anything()
            said = pack(record)
            arguments = [said, "it was seen to die"] if function is group.report_lost else [said]
        elif function in (contexts.forget, contexts.has_ended):
            arguments = [self._context()]
        elif function in (parts.gather, parts.abort, parts.go_on, parts.take, parts.plan):
            name = SentName(self.chance.randrange(1, 9), 0)
            names, given = wire.pack_names([name]), wire.to_wire({name: None})
            arguments = [self._context(), self._context()]
            if function is parts.plan:
                arguments += [names, False, 1.0, b"", *given]
            elif function is parts.gather:
                arguments = [self._context(), names]
            else:
                arguments += [names, "it failed"] if function is parts.abort else given
        elif function is come_to_barrier:
            arguments = ["", pack([0, 1, 2]), self.chance.choice((0.0, 0.1, 1e300, float("inf")))]
        elif getattr(function, "__module__", "") == handlers.__name__:
            arguments = [self._publication()]
        elif function is group.vouch:
            arguments = [self._int() % (1 << 63)]
        if self.chance.random() < 0.2:
            arguments = [self._anything() for _ in range(self.chance.randrange(4))]
        called = ByName(HANDLERS.index(function), find_name(function, True) or "?")
        maybe = self._maybe
        call = Call(called, values_of(arguments), remaining=maybe(0.5, 1.0), autograd=maybe(0.1, self._context()))
        self._send(connection, Kind.CALL, self._new_id(), call)

    def _publication(self) -> bytes:
        declared = self.chance.choice(PUBLICATION)
        fields: list[Any] = []
        for name in declared.__struct_fields__:
            if name == "name":
                fields.append("model")
            elif name in ("released", "versions", "held", "slots", "spans", "roles"):
                fields.append(self.chance.choice(([], [1], [self._int()], [[1, 2]])))
            else:
                fields.append(self.chance.choice((self.worker.id, 0, 1, self._int(), self._anything())))
        try:
            return pack(fields)
        except (OverflowError, TypeError, ValueError):
            return b""

    def _reference(self) -> list[Any]:
        word = self.chance.choice([*REFERENCES.classes])
        first = [*self._reference_id()]
        fork = [*self._reference_id()]
        if self.tame:
            mine = self._own_id()
            if word in ("ABANDON", "NEVER", "CHILD_OK"):
                first = self.chance.choice((mine, [self.worker.id, self.chance.randrange(99), 0]))
            else:
                word, fork = self.chance.choice(("ADD", "DEL")), mine
        if word == "ABANDON":
            return [word, first, [first[0], first[1] + 1, 0], self.chance.random() < 0.5, "given up"]
        if word == "GONE":
            return [word, first, fork, "gone"]
        return [word, first, fork] if word in ("ADD", "ADDED", "DEL") else [word, first]

    # --- by the callee ------------------------------------------------------------------------------------------------

    def _answer(self, connection: Connection) -> None:
        """Answer one of the calls that were heard, whoever has made it."""
        calls = [frame.call_id for frame in self.heard if frame.kind == Kind.CALL]
        if calls:
            kind = self.chance.choice((Kind.REPLY, Kind.REPLY, Kind.ITEM, Kind.ERROR))
            said = self._error() if kind == Kind.ERROR else [self._values()]
            for _ in range(self.chance.choice((1, 1, 2, 40))):
                self._send(connection, kind, self.chance.choice(calls), said)

    def _error(self) -> list[Any]:
        kind = self.chance.choice(("builtins:ValueError", "aiorpc.errors:Overloaded", "no.such:Error", ""))
        return [kind, "it failed", "", self.worker.name, self._maybe(0.2, b"\x80\x05."), self.chance.random() < 0.5]

    # --- values, buffers ----------------------------------------------------------------------------------------------

    def _values(self) -> Values:
        chance = self.chance
        values = [self._anything() for _ in range(chance.randrange(3))]
        if chance.random() < 0.7:
            return values_of(values)
        passed: list[Any] = []
        for _ in range(chance.randrange(3)):
            fork = [self.worker.id, chance.randrange(1 << 40), 0] if chance.random() < 0.7 else [*self._reference_id()]
            owner = chance.choice((0, 1, 2, self._int() % (1 << 31)))
            passed.append(PassedReference(self._reference_id(), owner, ReferenceId(*fork), self._maybe(0.5, 0)))
        pickled = self._maybe(0.3, chance.choice((b"", b"\x80\x05N.", b"\x80\x05]N.", chance.randbytes(9))))
        recorded = self._maybe(0.2, [self._context(), chance.randrange(9), [0], [chance.choice((None, [1, 1, 0]))]])
        table = self._maybe(0.2, chance.choice(([], [[0, 6, [3], [1], 0, False]], self._odd(2))))
        places = self._places(), self._places()
        return Values(values, (), *places, pickled, chance.choice((0, 0, 1)), table, passed, recorded)

    def _places(self) -> list[Any]:
        return self.chance.choice(([], [], [0], [1, 0], [-1], [1 << 40]))

    def _parcel(self) -> Parcel:
        wires: list[Any] = []
        for _ in range(self.chance.randrange(1, 4)):
            channel = self.chance.randrange(6)
            if channel == 1:
                block = [self._int() for _ in range(4)] + [self.chance.randrange(4)]
                wires.append((channel, block if self.chance.random() < 0.7 else [*block, 0, self._int()]))
            elif channel == 2:
                wires.append((channel, [self.chance.randrange(1, 5), self.chance.choice((1, 8, 1000, 1 << 20))]))
            else:
                wires.append((channel, self.chance.choice(([], self._odd(2)))))
        kind = self.chance.choice((Kind.CALL, Kind.CALL, Kind.REPLY, Kind.ITEM, Kind.CHANNEL, self._int() % 20))
        return Parcel(kind, wires, pack(self._call() if kind == Kind.CALL else [self._values()]))

    def _parcel_to_come(self) -> Parcel:
        """A call that waits for a buffer, of which nothing comes."""
        return Parcel(Kind.CALL, [(2, [self._new_id(), 1000])], pack(self._call()))

    def _channel(self) -> list[Any]:
        families = (link_messages.MESSAGES, shared_messages.MESSAGES, None, None, device_messages.MESSAGES)
        number = self.chance.randrange(6)
        family: Any = families[number] if number < len(families) else None
        if family is None:
            return [number, self._odd(2)]
        word, declared = self.chance.choice([*family.classes.items()])
        if word == "offer":
            return [number, [word, self.chance.randrange(4), self.chance.randrange(99), 4096, bytes(16)]]
        return [number, [word, *(self.chance.choice((0, 1, 64, "x", [], {})) for _ in declared._fields)]]

    def _chunk(self) -> bytes:
        size = self.chance.choice((8, 1000, 1 << 20, 1 << 63))
        return messages.write_chunk(messages.Chunk(self.chance.choice((0, 0, 8, size, (1 << 64) - 1)), size))

    def _segments(self) -> list[bytes]:
        return [bytes(self.chance.choice((0, 1, 8, 1000))) for _ in range(self.chance.choice((0, 0, 1, 1, 2)))]

    # --- numbers ------------------------------------------------------------------------------------------------------

    def _new_id(self) -> int:
        self._next += 1
        return self._next

    def _id(self) -> int:
        """Of a call that was heard, that was made, or that is none."""
        heard = [frame.call_id for frame in self.heard]
        made = self._next - self.chance.randrange(4)
        return self.chance.choice([*heard[-3:], made, made, self.chance.randrange(60), abs(self._int())])

    def _int(self) -> int:
        return self.chance.choice((*EXTREMES, self.chance.randrange(300)))

    def _context(self) -> int:
        """An autograd context, or a pass in one: those of others are as good as its own."""
        return self.chance.choice((0, 1, 2)) << 48 | self.chance.randrange(1, 12)

    def _reference_id(self) -> ReferenceId:
        """What may be a reference of anybody: it knows no keys but 0."""
        worker = self.chance.choice((0, 1, 2, 2, 2, self._int() % (1 << 31)))
        return ReferenceId(worker, self.chance.choice((0, 1, 2, 3, self.chance.randrange(1 << 20))), 0)

    def _own_id(self) -> list[int]:
        """One that it may name, and has not."""
        return [self.worker.id, 2 * self._new_id(), 0]

    def _anything(self) -> Any:
        return self.chance.choice((*ODD, self._int(), "abc", b"abc", 0.1))

    def _odd(self, most: int) -> list[Any]:
        return [self._anything() for _ in range(self.chance.randrange(most + 1))]

    def _maybe(self, share: float, value: Any) -> Any:
        return value if self.chance.random() < share else None


def calling(worker: Worker, name: str) -> Connection:
    """The connection over which it calls that worker."""
    connection = worker._node.peers.find(name).connection
    assert connection is not None
    return connection


def serving(worker: Worker, name: str) -> Connection:
    """The connection over which it serves that worker."""
    (connection,) = [each.connection for each in worker._node.services if each.record.name == name]
    return connection


def say(connection: Connection, kind: int | str, call_id: int, message: Any, segments: Sequence[bytes] = ()) -> None:
    """Send one message over a connection of a worker, which knows nothing of it. kind: also by its name."""
    kind = Kind[kind] if isinstance(kind, str) else kind
    body = message if type(message) is bytes else pack(message) if type(message) is list else messages.write(message)
    connection.send(encode_frame(kind, call_id, body, segments), urgent=True)


def call_of(function: Any, *values: Any) -> Call:
    """A call with plain arguments. function: its name, or what stands for one in a message."""
    named = ByName(1 << 30, function) if type(function) is str else function
    return Call(named, values_of([*values]))


def method_of(name: str, method: str) -> ObjectMethod:
    """What stands for a method of an object by its name in a call."""
    return ObjectMethod(name, method)


def values_of(values: list[Any]) -> Values:
    """Values without anything but plain ones."""
    return Values(values)
