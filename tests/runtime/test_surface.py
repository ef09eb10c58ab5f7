"""The runtime's own handlers: the list of them is whole, and they take nothing but what they declare."""

from __future__ import annotations

import importlib
import logging
import pickle
import pkgutil
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Annotated, Any

import msgspec
import pytest
import torch

import aiorpc
from aiorpc import RpcBackendOptions, Worker
from aiorpc.errors import ProtocolError
from aiorpc.protocol.codec import Outgoing
from aiorpc.protocol.frames import Frame, Kind
from aiorpc.protocol.messages import ByName, Call, ObjectMethod, Recorded, Reply, Values, read_values
from aiorpc.protocol.reference_messages import PassedReference, ReferenceId
from aiorpc.protocol.trees import write_tree
from aiorpc.runtime import surface
from aiorpc.runtime.calls import functions
from aiorpc.runtime.calls.declared import TEXT_LIMIT, Declaration, declaration_of, pack
from aiorpc.runtime.calls.values import encode
from aiorpc.runtime.group import group
from aiorpc.testing import cluster
from tests.runtime.bad_member import call_of, calling, say, values_of
from tests.runtime.inside import act_as, act_no_more
from tests.runtime.waiting import LIMIT, until
from tests.tiers import examples

ROOT = Path(__file__).parents[2]
MARK = "n0b0dy sh0ws this"  # no name of anything that has one


def double(value: Any) -> Any:
    return value * 2


# --- the list ---------------------------------------------------------------------------------------------------------


def marked() -> dict[str, FunctionType]:
    """Every handler of the runtime that bears a mark, by its name."""
    found: dict[str, FunctionType] = {}
    for info in pkgutil.walk_packages(aiorpc.__path__, "aiorpc."):
        if info.name.endswith(("__main__", "compat.torchrl")):  # the import runs a command, or changes torch's modules
            continue
        module = importlib.import_module(info.name)
        spaces = [module, *(each for each in vars(module).values() if isinstance(each, type))]
        for each in (thing for space in spaces for thing in vars(space).values()):
            if functions.is_declared(each) and each.__module__ == info.name:
                found[f"{each.__module__}:{each.__qualname__}"] = each
    return found


def test_the_list_has_each_handler_once() -> None:
    """All that bear a mark, and no other."""
    names = [each.name for each in surface.HANDLERS]
    assert sorted(names) == sorted(marked())


def test_each_handler_declares_its_arguments() -> None:
    """With what can be read: a handler without that is found here."""
    for handler in marked().values():
        declaration_of(handler)


def test_security_shows_the_same_table() -> None:
    """As the list makes it."""
    assert surface.as_table() in (ROOT / "SECURITY.md").read_text()


# --- declarations -----------------------------------------------------------------------------------------------------


class Point(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    x: int
    name: str


class Loose(msgspec.Struct):
    x: int


def read(function: Callable[..., Any], *values: Any, **fields: Any) -> list[Any]:
    return Declaration(function).read(Values([*values], **fields)).values


def takes(number: int, text: Annotated[str, msgspec.Meta(max_length=3)], data: bytes, more: float = 1.0) -> None: ...


def takes_packed(points: list[Point], *others: int) -> None: ...


def takes_tensors(names: bytes, *gradients: torch.Tensor | None) -> None: ...


def test_arguments_come_as_they_are_declared() -> None:
    """Plain ones, containers in bytes of their own, and tensors and references in the places that declare them."""
    assert read(takes, 1, "abc", b"x") == [1, "abc", b"x"]
    assert read(takes, 1, "abc", b"x", 2.5) == [1, "abc", b"x", 2.5]
    assert read(takes_packed, pack([[1, "a"]]), 1, 2) == [[Point(1, "a")], 1, 2]
    entry = [-1, 0, 0, [0], None, 0, None]
    assert read(takes_tensors, b"", None, None, tensors_at=[2], table=[entry]) == [b"", None, None]


@pytest.mark.parametrize(
    ("function", "values"),
    [
        (takes, (1, "abc")),
        (takes, (1, "abc", b"", 1.0, 1)),
        (takes, (True, "abc", b"")),
        (takes, (1.0, "abc", b"")),
        (takes, (1, "abcd", b"")),
        (takes, (1, b"abc", b"")),
        (takes, (1, "abc", "aGk=")),
        (takes, (1, "abc", [1])),
        (takes, (1, "abc", {MARK: MARK})),
        (takes, (None, "abc", b"")),
        (takes, (1, "abc", b"", "1")),
        (takes_packed, ([[1, "a"]],)),
        (takes_packed, (pack([[1]]),)),
        (takes_packed, (pack([[1, MARK, MARK]]),)),
        (takes_packed, (pack([{"x": 1, "name": MARK}]),)),
        (takes_packed, (pack([[1, "a"]]) + b"\x01",)),
        (takes_packed, (b"\xdd\xff\xff\xff\xff",)),
        (takes_packed, (b"\x91" * 100_000,)),
        (takes_packed, (MARK.encode(),)),
        (takes_packed, (pack([]), 1, True)),
        (takes_tensors, (b"", 1)),
        (takes_tensors, ("", None)),
    ],
)
def test_what_is_not_declared_is_refused_without_a_word_of_it(function: Any, values: tuple[Any, ...]) -> None:
    """Wrong types, counts, lengths and bytes; the error names the argument, and shows no value."""
    with pytest.raises(ProtocolError, match=f"^{function.__name__} of the runtime was called with") as refused:
        read(function, *values)
    assert MARK not in str(refused.value) and len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "fields",
    [
        {"pickled": b"\x80\x05N.", "opaque_at": [0]},
        {"pickled": b""},
        {"opaque_at": [0]},
        {"buffers": 1},
        {"gradients": Recorded(1, 1, [0], [None])},
        {"tensors_at": [0], "table": [[]]},  # where bytes are declared
        {"tensors_at": [1, 1], "table": [[], []]},
        {"tensors_at": [1], "table": [[], []]},
        {"tensors_at": [1]},
        {"tensors_at": [7], "table": [[]]},
        {"tensors_at": [-1], "table": [[]]},
        {"tensors_at": [True], "table": [[]]},
        {"tensors_at": ["1"], "table": [[]]},
        {"tensors_at": [[1]], "table": [[]]},
        {"table": [[]]},
        {"references": [PassedReference(ReferenceId(1, 2, 3), 1, ReferenceId(0, 0, 1), 1)]},
        {"references": [PassedReference(ReferenceId(1, 2, 3), 1, ReferenceId(0, 0, 1), None)]},
    ],
)
def test_nothing_else_in_a_message_is_read(fields: dict[str, Any]) -> None:
    """No pickle, no tree, no buffer, no reference, no past, and no tensor without a place that declares one."""
    with pytest.raises(ProtocolError, match="takes_tensors of the runtime"):
        read(takes_tensors, b"", None, **fields)


def test_a_text_has_a_limit_in_any_case() -> None:
    """Where the handler declares none."""

    def takes_text(text: str) -> None: ...

    assert read(takes_text, "x" * TEXT_LIMIT)
    with pytest.raises(ProtocolError, match="length"):
        read(takes_text, "x" * (TEXT_LIMIT + 1))


def test_a_handler_that_declares_too_little_is_an_error() -> None:
    """No annotation, one of anything, keyword arguments, a class that is not read here."""

    def untyped(value) -> None: ...  # type: ignore[no-untyped-def]

    def anything(value: Any) -> None: ...

    def inside(value: list[Any]) -> None: ...

    def by_keyword(*, value: int) -> None: ...

    def loose(value: Loose) -> None: ...

    def several(value: torch.Tensor | list[int]) -> None: ...

    for function in (untyped, anything, inside, by_keyword, loose, several):
        with pytest.raises(TypeError, match=function.__name__):
            Declaration(function)


# --- a campaign -------------------------------------------------------------------------------------------------------


def shapes(chance: random.Random) -> Iterator[Any]:
    """Values of many kinds, as somebody sends them to see what is done with them."""
    yield from (None, True, -1, 1 << 63, 1.5, float("nan"), MARK.encode(), b"", [MARK], [[MARK]] * 3, {MARK: [MARK]})
    yield from ((MARK, 1), {1, 2}, frozenset([MARK]), 1 << 70, 1j, slice(1), torch.float16, torch.Size([1]))
    yield from (torch.ones(3), torch.ones(2, 2).to_sparse(), torch.ones(2, 2).to_sparse_csr(), torch.zeros(0))
    yield torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8)
    yield [torch.ones(3), {MARK: torch.ones(2)}]
    yield [chance.choice((MARK.encode(), chance.random(), chance.getrandbits(64))) for _ in range(4)]


def arguments(chance: random.Random, worker: Worker, safe: bool) -> tuple[Values, list[bytes]]:
    """Some of those, as an honest sender would write them; or bytes that are meant for something else."""
    every = [*shapes(chance)]
    given = [chance.choice(every) for _ in range(chance.randrange(5))]
    way = chance.randrange(4)
    if way == 0:
        packed = pack(chance.choice(([], [MARK], [[MARK] * 13], {MARK: 1}, [1, 2], [0, 1, 2])))
        return values_of([packed]), []
    if way == 1:
        plain = [each for each in given if type(each) in (float, bool, bytes)]
        return values_of([chance.randrange(4), chance.randrange(1, 4), *plain]), []
    if way == 2:
        written = write_tree(tuple(given[:1]), Outgoing(safe=True)) if safe else pickle.dumps((MARK, given[:1]), 5)
        return Values([None], opaque_at=[0], pickled=written), []
    target = worker._node.peers.find("worker0")
    written, buffers, sent = encode(Reply(Values(given)), target)
    assert sent is None
    return read_values(written), [bytes(each) for each in buffers]


@pytest.mark.random
@pytest.mark.parametrize("serialization", ["free", "safe"])
async def test_whatever_is_sent_to_them_nothing_ends_and_nothing_is_shown(
    serialization: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """To each handler of the list, by a member that may call nothing but the methods of a queue."""
    options = RpcBackendOptions(
        rpc_timeout=LIMIT,
        serialization=serialization,
        allow={"actor": ["queue/open:*"], "*": [f"{__name__}:double"]},
    )
    chance = random.Random(7)
    async with cluster(3, options=options, roles=["", "", "actor"]) as (victim, other, bad):
        token = act_as(victim)
        aiorpc.Queue("open", 5)
        act_no_more(token)
        assert await other.call("worker0", double, 1) == 2
        with pytest.raises(aiorpc.NotAllowed):
            await bad.call("worker0", double, 1)
        connection, heard, number = calling(bad, "worker0"), list[Frame](), 1 << 40
        connection.on_frames = heard.extend
        connection.on_stood = connection.takes = None
        for _ in range(examples(300) // 10 + 1):
            for place, handler in enumerate(surface.HANDLERS):
                number += 1
                method = handler.name.partition("ServedQueue.")[2]
                named = ObjectMethod("open", method) if method else ByName(1000 + place, handler.name)
                given, segments = arguments(chance, bad, serialization == "safe")
                names = ["a"] if chance.random() < 0.05 else None
                creates = ReferenceId(2, 2 * number, 0) if chance.random() < 0.03 else None
                call = Call(named, given, names, 20.0, creates=creates)
                say(connection, Kind.CALL, number, call, segments)
            assert await other.call("worker0", double, 21) == 42
        number += 1
        say(connection, Kind.CALL, number, call_of(surface.HANDLERS[5].name))
        await until(lambda: any(each.call_id == number for each in heard))
        assert not connection.closed
        errors = [bytes(each.body) for each in heard if each.kind == Kind.ERROR]
        assert len(errors) > len(surface.HANDLERS) / 2
        for each in errors:
            assert MARK.encode() not in each and b"tensor(" not in each
    for record in caplog.records:
        assert MARK not in record.getMessage() and record.levelno < logging.ERROR


# --- answers ----------------------------------------------------------------------------------------------------------

loaded: list[str] = []


class Loaded(Exception):
    """It is seen when it is unpickled, as a value and as an error."""

    def __reduce__(self) -> tuple[Callable[[], Loaded], tuple[()]]:
        return note_loaded, ()


def note_loaded() -> Loaded:
    loaded.append("unpickled")
    return Loaded()


def answer_with(monkeypatch: pytest.MonkeyPatch, made: Callable[[], Any]) -> None:
    """The handler `present` of all workers here does that."""

    async def present() -> None:
        return made()  # type: ignore[no-any-return]  # on purpose

    present.__module__, present.__qualname__ = group.__name__, "present"
    monkeypatch.setattr(group, "present", functions.system(present))
    monkeypatch.setattr("aiorpc.worker.present", present)


def raise_loaded() -> None:
    raise Loaded


@pytest.mark.parametrize("made", [Loaded, raise_loaded])
async def test_what_a_member_answers_to_the_runtime_is_not_unpickled(
    made: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker asks it whether it is there: the program has not chosen to call it."""
    loaded.clear()
    async with cluster(2) as (worker, _):
        with monkeypatch.context() as patched:
            answer_with(patched, made)
            with pytest.raises(aiorpc.RpcError, match="is pickled" if made is Loaded else "raised .*Loaded"):
                await worker.wait_for("worker1")
    # The one that has raised it looks whether it can be made again.
    assert len(loaded) == (made is raise_loaded)


async def test_what_a_member_answers_has_the_type_that_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it says nothing."""
    async with cluster(2) as (worker, _):
        with monkeypatch.context() as patched:
            answer_with(patched, lambda: "something else")
            with pytest.raises(aiorpc.RpcError, match="present of the runtime has answered with something else"):
                await worker.wait_for("worker1")


def test_answers_of_all_that_serve_everybody_are_read_plainly() -> None:
    """But for those that bring what users' code has made: of passes that the caller takes part in, and kept items."""
    carrying = {
        name for name, each in marked().items() if functions.is_intrinsic(each) and not functions.answers_plainly(each)
    }
    assert {name.rpartition(":")[2] for name in carrying} == {
        "plan",
        "go_on",
        "take",
        "backward_on_owner",
        "hand_over",
    }
