"""Values to and from the wire.

A message carries a list of values (the arguments of a call, the one result of a reply) as `messages.Values`. Tensors
always leave the body, also those inside pickled objects, where ``(load_tensor, index)`` replaces them; a tensor with
Python attributes is pickled because of these. Tensors of other kinds are taken apart into such ones (`reductions`). A
container is pickled, because msgpack would turn tuples into lists and bytearrays into bytes, and would lose which
objects were the same.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from types import AsyncGeneratorType, CodeType, CoroutineType, FunctionType, GeneratorType
from typing import Any, ClassVar, NamedTuple, Protocol

import cloudpickle
import torch

from ..errors import ProtocolError, SerializationError
from ..foreign import text_of
from . import reductions
from .annotated import readable, with_annotations
from .failing import find_failing
from .frames import Buffer
from .main_module import unite
from .messages import Values
from .packing import PLAIN, SIMPLE_SIZE, is_text
from .reductions import TensorRoute, is_dense
from .reference_messages import PassedReference
from .registered import MAIN_NAMES
from .trees import read_tree, write_tree

_STACK_GLOBAL = b"\x93"  # the opcode with which a pickle of protocol 4 or later names a class or function

_LONG = 1 << 20  # bytes; shorter values do not matter for the limits of messages

_MINOR = f"{sys.version_info[0]}.{sys.version_info[1]}"
code_reduce = cloudpickle.Pickler.dispatch_table[CodeType]

Tensor = torch.Tensor
Past = reductions.Past


class Outgoing:
    """What is collected while one message is encoded.

    target: the runtime's handle of the worker it goes to. same_main: whether both sides run the same main module, whose
    definitions then go by name. route: for tensors on devices; None: there is none. apart: whether to note the sparse
    tensors that require gradients; they are taken apart. safe: whether the group reads no pickles; then values go in
    the safe encoding (`trees`). lent: the references that are kept until the call has its answer, which their owner
    need not count; None if nothing can be lent. on_unsent: what to undo if the frame never leaves.
    most: bytes that a pickle may have; None: no limit.
    posted: whether the sender of the message runs `on_unsent`; until then its maker does.
    other_python: the minor version of Python there, if it is known and different: then no code travels by value.
    places: by id, the positions in `tensors` of those that are values by themselves: one given twice arrives as one.
    """

    __slots__ = (
        "apart",
        "buffers",
        "lent",
        "most",
        "on_unsent",
        "other_python",
        "places",
        "posted",
        "references",
        "route",
        "safe",
        "same_main",
        "target",
        "tensors",
    )

    def __init__(
        self,
        target: object = None,
        *,
        same_main: bool = False,
        route: TensorRoute | None = None,
        apart: bool = False,
        safe: bool = False,
        lends: bool = False,
        most: int | None = None,
        other_python: str = "",
    ) -> None:
        self.target: object = target
        self.most: int | None = most
        self.other_python: str = other_python
        self.apart: list[Tensor] | None = [] if apart else None
        self.route: TensorRoute | None = route
        self.safe: bool = safe
        self.same_main: bool = same_main
        self.tensors: list[Tensor] = []
        self.places: dict[int, int] = {}
        self.buffers: list[Buffer] = []
        self.references: list[PassedReference] = []
        self.lent: list[object] | None = [] if lends else None
        self.on_unsent: list[Callable[[], None]] = []
        self.posted: bool = False

    def unsend(self) -> None:
        """Undo what encoding did elsewhere: the frame will not be sent."""
        for undo in self.on_unsent:
            undo()
        self.on_unsent.clear()


class Travels(Protocol):
    """A value that travels as a remote reference, such as an RRef."""

    def _travel(self, out: Outgoing, position: int | None) -> None:
        """Put it into a message, as the value at that position or inside another one (None)."""


class Incoming(NamedTuple):
    """What the pickle of a message being decoded can refer to. past: gives tensors that were taken apart their
    gradients; None if there are none.

    safe: whether the group reads no pickles: then the message's pickle is in the safe encoding.
    """

    tensors: Sequence[Tensor]
    references: Sequence[object]
    past: Past | None = None
    safe: bool = False


# Values with an encoding of their own (RRef) read these while they are pickled and unpickled.
outgoing: ContextVar[Outgoing | None] = ContextVar("aiorpc_outgoing", default=None)
incoming: ContextVar[Incoming | None] = ContextVar("aiorpc_incoming", default=None)


def encode_values(values: list[Any], out: Outgoing) -> Values:
    """The values as they travel; tensors, buffers and references are left in `out`, for the caller to add.

    Raises SerializationError with the position of the value that cannot be serialised.
    """
    tensors_at: list[int] = []
    opaque_at: list[int] = []
    plain, route = values, out.route
    for position, value in enumerate(values):
        kind = type(value)
        if (
            kind in PLAIN
            and (kind is not int or -(1 << 63) <= value < 1 << 64)
            # Lone surrogates are valid in str and not in UTF-8. isascii is O(1) and true for nearly all.
            and (kind is not str or value.isascii() or is_text(value))
        ):
            continue
        if plain is values:
            plain = list(values)
        plain[position] = None
        if (
            kind is Tensor
            and id(value) not in out.places
            and (
                # `_goes_alone`, without a call for each tensor.
                value.is_cpu
                and value.layout is torch.strided
                and not (value.is_quantized or value.is_nested or value.__dict__)
                if route is None
                else _goes_alone(value, position, route)
            )
        ):
            tensors_at.append(position)
            out.places[id(value)] = len(out.tensors)
            out.tensors.append(value)
        elif hasattr(kind, "_travel"):  # a remote reference
            refer(value, position, out)
        else:
            opaque_at.append(position)
    pickled = _pickle_all(values, opaque_at, out) if opaque_at else None
    return Values(
        plain,
        tensors_at=tensors_at,
        opaque_at=opaque_at,
        pickled=pickled,
        buffers=len(out.buffers),
        references=out.references,
    )


def refer(value: Travels, position: int, out: Outgoing) -> None:
    """Put a remote reference at that position. Raises SerializationError if it cannot travel."""
    try:
        value._travel(out, position)
    except Exception as cause:
        kind = type(value).__qualname__
        raise SerializationError(f"(a {kind}) cannot be serialised: {text_of(cause)}", position) from cause


def _goes_alone(tensor: Tensor, position: int, route: TensorRoute) -> bool:
    try:
        return is_dense(tensor, route) and not tensor.__dict__
    except SerializationError as error:
        raise SerializationError(f"is {error}", position) from None


def decode_values(message: Values, inside: Incoming, buffers: Sequence[Buffer]) -> list[object]:
    """The values of a message. Raises what unpickling raises, and ProtocolError for an invalid message."""
    values = message.values
    try:
        for position, tensor in zip(message.tensors_at, inside.tensors, strict=False):
            values[position] = tensor
        if inside.references:
            for passed, reference in zip(message.references, inside.references, strict=True):
                if passed.position is not None:
                    values[passed.position] = reference
    except (TypeError, IndexError, ValueError) as error:
        raise ProtocolError(f"a message whose tensors or references have no place: {error}") from None
    if message.pickled:
        opaque: Any = (read_tree if inside.safe else loads)(message.pickled, inside, buffers)
        try:
            for position, value in zip(message.opaque_at, opaque, strict=True):
                values[position] = value
        except (TypeError, IndexError, ValueError) as error:
            raise ProtocolError(f"a message whose pickled values have no place: {error}") from None
    elif message.opaque_at:
        raise ProtocolError("a message without its pickle")
    return values


def is_simple(items: Sequence[Any], depth: int = 3) -> bool:
    """Whether these are few plain values and builtin containers of them: the standard pickler will do."""
    if len(items) > SIMPLE_SIZE:
        return False
    for item in items:
        kind = type(item)
        if kind in PLAIN:
            if (kind is bytes or kind is str) and len(item) > _LONG:
                return False
            continue
        if not depth or not (
            is_simple(item, depth - 1)
            if kind is list or kind is tuple
            else kind is dict and is_simple(tuple(item), 0) and is_simple(tuple(item.values()), depth - 1)
        ):
            return False
    return True


def _pickle_all(values: list[object], positions: list[int], out: Outgoing) -> bytes:
    """One pickle of the values at these positions, or one safe encoding."""
    opaque = tuple([values[position] for position in positions])
    if not out.safe and is_simple(opaque):
        return pickle.dumps(opaque, 5)  # the same bytes as our pickler's, in a fraction of the time
    write = write_tree if out.safe else dumps
    token = outgoing.set(None if out.safe else out)
    try:
        return write(opaque, out)
    except TooLong:
        raise
    except Exception as error:
        # Find the value to blame: write them one by one. Their traces in `out` are dropped with the message.
        for position, value in zip(positions, opaque, strict=True):
            try:
                write(value, out)
            except Exception as cause:
                path, inner = find_failing(value, lambda each: write(each, out), cause)
                text = text_of(cause)
                if out.safe and isinstance(cause, SerializationError):  # its text names the value
                    text = f"has at {path} what {text}" if path else text
                else:
                    where = f" at {path} (a {_kind_of(inner)})" if path else ""
                    text = f"(a {_kind_of(value)}) cannot be serialised{where}: {text}"
                raise SerializationError(text + (_hint(value) or _hint(inner)), position) from cause
        reason = f"cannot be serialised together with the others: {text_of(error)}"
        raise SerializationError(reason, positions[0]) from error
    finally:
        outgoing.reset(token)


def _kind_of(value: object) -> str:
    return "Future" if isinstance(value, torch._C.Future) else type(value).__qualname__


def _hint(value: object) -> str:
    """What to write instead of a value that cannot travel; empty if that is not known."""
    if isinstance(value, (GeneratorType, AsyncGeneratorType)):
        return "; send a list of its items, or write `yield` in the function that is called and use rpc.stream"
    if isinstance(value, CoroutineType):
        return "; await it, and send what it gives"
    if isinstance(value, torch._C.Future):
        return "; await it, and send what it gives; a `def` that returns a Future is marked with @rpc.async_execution"
    if isinstance(value, FunctionType) and hasattr(value, "_torchdynamo_orig_callable"):
        return (
            "; what torch.compile gives goes by its name alone: put @torch.compile above the function, at the top of a "
            "module that both workers can import, or send the function as it was before"
        )
    return ""


class TooLong(SerializationError):
    """A pickle that no message can hold."""


class _Bounded(io.BytesIO):
    """Takes no more bytes than a message may have: a longer pickle is refused before it is copied."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def write(self, data: Buffer) -> int:  # type: ignore[override]  # a pickler writes buffers
        if self.tell() + len(data) > self._most:
            raise TooLong(f"more than {self._most} bytes")
        return super().write(data)


def dumps(value: object, out: Outgoing) -> bytes:
    """Pickle one object for the wire; its dense tensors go to `out`. Raises TooLong, and what pickling raises."""
    file = io.BytesIO() if out.most is None else _Bounded(out.most)
    _Pickler(file, out).dump(value)
    return file.getvalue()


def loads(data: bytes, message: Incoming, buffers: Sequence[Buffer] = ()) -> Any:
    """Unpickle one object from the wire. Raises what unpickling raises."""
    if _STACK_GLOBAL not in data:  # it names nothing, so it needs no context
        return pickle.loads(data, buffers=buffers)
    token = incoming.set(message)
    try:
        return _Unpickler(io.BytesIO(data), buffers=buffers).load()
    finally:
        incoming.reset(token)


def _take_buffer(out: Outgoing, buffer: pickle.PickleBuffer) -> bool:
    try:
        raw = buffer.raw()
    except BufferError:
        return True  # not contiguous: pickle copies it into the stream
    out.buffers.append(raw)
    return False


def _reduce_file(file: io.TextIOWrapper) -> reductions.Reduced:
    """The standard streams stand for those of the other process; other files cannot travel."""
    if file is sys.stdout or file is sys.stderr:
        reduced: reductions.Reduced = cloudpickle.Pickler.dispatch_table[io.TextIOWrapper](file)
        return reduced
    raise SerializationError(
        "an open file stays with its process; send what file.read() gives, or its path where the other worker has it, "
        "too"
    )


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Takes tensors out of band; sends what the main module defines by name when both sides run the same one."""

    # Before cloudpickle's, which would send the contents of an open file.
    dispatch_table: ClassVar[object] = ChainMap({io.TextIOWrapper: _reduce_file}, cloudpickle.Pickler.dispatch_table)

    def __init__(self, file: io.BytesIO, out: Outgoing) -> None:
        # A partial, not a method: a cycle would keep all that was pickled until the garbage collector runs.
        super().__init__(file, protocol=5, buffer_callback=partial(_take_buffer, out))
        self._out = out

    def reducer_override(self, value: object) -> object:
        if isinstance(value, Tensor):
            if not is_dense(value, self._out.route):
                apart = self._out.apart
                if apart is None or not reductions.has_sparse_past(value):
                    taken = reductions.reduce_tensor(value, self._out.route)
                    return NotImplemented if taken is None else taken
                apart.append(value)
                return reductions.with_state((load_past, (len(apart) - 1, value.detach())), value)
            place = self._out.places.get(id(value))
            if place is not None:
                return load_tensor, (place,)
            tensors = self._out.tensors
            tensors.append(value)
            made = load_tensor, (len(tensors) - 1,)
            attributes = value.__dict__
            return (*made, attributes, None, None, reductions.restore_state) if attributes else made
        reduce = reductions.OTHERS.get(type(value))
        if reduce is not None:
            return reduce(value, self._out.route)
        if isinstance(value, (type, FunctionType)) and value.__module__ in MAIN_NAMES and self._out.same_main:
            found = find_main(value.__qualname__)
            if found is value:
                return load_main, (value.__qualname__,)
        if isinstance(value, FunctionType) and getattr(value, "__module__", None) is None:
            # It was made by `exec`, and belongs to no module. cloudpickle would look for it in all modules, which takes
            # long, and modules that invent attributes, such as torch.ops, would keep the invented one.
            return self._dynamic_function_reduce(value)
        if isinstance(value, CodeType):  # in any container: code of another version would crash the interpreter
            return load_code, (_MINOR, value.co_filename, *code_reduce(value)[1])
        reduced = super().reducer_override(value)
        if isinstance(value, type):
            if self._out.other_python and type(reduced) is tuple and len(reduced) > 2:
                raise _needs_same_python(value, self._out.other_python)
            return with_annotations(value, reduced)
        return reduced

    def _dynamic_function_reduce(self, function: FunctionType) -> object:
        if self._out.other_python:
            raise _needs_same_python(function, self._out.other_python)
        return super()._dynamic_function_reduce(readable(function))


def _needs_same_python(value: type | FunctionType, theirs: str) -> SerializationError:
    return SerializationError(
        f"{value.__qualname__!r} would travel by value, which needs one version of Python on both sides: here it is "
        f"{_MINOR}, there {theirs}; define it at the top of a module that both can import"
    )


def load_code(python: str, file: str, *parts: Any) -> CodeType:
    """Used in pickles: compiled code, by the minor version of Python that has compiled it.

    file: of its source, for tracebacks; cloudpickle 3.1.3 leaves it out.
    """
    if python != _MINOR:
        made = python if isinstance(python, str) and len(python) < 8 and python.isascii() else "another version"
        raise SerializationError(
            f"a function or class that came by value was made by Python {made}, and this is {_MINOR}: the code of one "
            "does not run in the other; define it at the top of a module that both can import"
        )
    code = CodeType(*parts)
    return code if code.co_filename == file else code.replace(co_filename=file)


def load_tensor(index: int) -> Tensor:
    """Used in pickles: the tensor with that number in the message."""
    message = incoming.get()
    if message is None:
        raise ProtocolError("a tensor reference outside of a message")
    return message.tensors[index]


def load_past(index: int, tensor: Tensor) -> Tensor:
    """Used in pickles: a tensor that was taken apart and requires gradients, number `index` of those in the message."""
    message = incoming.get()
    if message is None or message.past is None:  # the context was left meanwhile
        return tensor.requires_grad_()
    return message.past(index, tensor)


def load_reference(index: int) -> object:
    """Used in pickles: remote reference number `index` of the message."""
    message = incoming.get()
    if message is None:
        raise ProtocolError("a remote reference outside of a message")
    return message.references[index]


def load_main(qualname: str) -> object:
    """Used in pickles: the definition `qualname` of the main module."""
    found = find_main(qualname)
    if found is None:
        raise AttributeError(f"the main module here defines no {qualname!r}")
    return found


def find_main(qualname: str) -> object:
    """The definition of that name in the main module, or None. Spawned children call it ``__mp_main__``."""
    for name in MAIN_NAMES:
        found: object = sys.modules.get(name)
        for part in qualname.split("."):
            found = getattr(found, part, None)
        if found is not None:
            return found
    return None


class _Unpickler(pickle.Unpickler):
    """Finds the main module under either of its names."""

    def find_class(self, module: str, name: str) -> object:
        if module in MAIN_NAMES:
            return load_main(name)
        if module not in sys.modules:
            unite(module)
        return super().find_class(module, name)
