"""The arguments and answers of the runtime's own handlers, decoded by the handlers' annotations.

Every member may call these handlers, so nothing that a caller sends is built before it fits the declaration: no pickle,
no safe encoding, no reference and no tensor in a place that does not declare one. An annotation is made of

- None, bool, int, float, str and bytes, which travel as they are,
- lists, tuples and dicts of those, and `msgspec.Struct` classes, which travel as MessagePack bytes (`pack`),
- `torch.Tensor`, for a dense tensor in the table of the message, and `RRef`,
- unions of these, and `Annotated[..., msgspec.Meta(...)]` for limits.

A text has at most `TEXT_LIMIT` characters unless another limit is declared. An error names the argument and its types,
and never shows the caller's values.

The caller reads the answer in the same way (`Declaration.check_answer`): it is None, a number, a text, bytes, or a
`Results` of these, of tensors and of references. Errors are read by name and text. Exceptions are handlers that carry
values of users' code (`functions.carries`), and methods of queues, whose owner the program has chosen.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec.structs import replace
from torch import Tensor

from ..._typing import T
from ...errors import ProtocolError
from ...protocol.messages import Values

#: Characters of a text for which a handler declares no limit of its own.
TEXT_LIMIT = 16 * 1024
_Text = Annotated[str, msgspec.Meta(max_length=TEXT_LIMIT)]
_SCALARS = frozenset((type(None), bool, int, float, bytes))
_CONTAINERS = frozenset((list, tuple, dict))
_BUILTIN = (bytes,)  # no text in place of bytes

#: MessagePack of a compound argument.
pack: Callable[[object], bytes] = msgspec.msgpack.encode


class _Slot(NamedTuple):
    """One declared argument. plain: the type for msgspec. packed: its decoder, if it travels as MessagePack bytes.

    tensor, reference: whether it may be a tensor or a reference. optional: whether it may be None.
    """

    name: str
    plain: Any
    packed: msgspec.msgpack.Decoder[Any] | None
    tensor: bool
    reference: bool
    optional: bool


class Declaration:
    """The declared arguments of one handler. Any thread."""

    def __init__(self, function: Callable[..., object]) -> None:
        """Raise TypeError for a handler whose annotations are incomplete, or have an unknown type."""
        self.name: str = function.__qualname__
        hints = get_type_hints(function, include_extras=True)
        slots: list[_Slot] = []
        self._rest: _Slot | None = None
        self._least = 0
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name == "self" and not slots:
                continue
            if parameter.name not in hints or (
                parameter.kind is not parameter.VAR_POSITIONAL and self._rest is not None
            ):
                raise TypeError(f"argument {parameter.name!r} of {self.name} is not declared")
            slot = _slot(self.name, parameter.name, hints[parameter.name])
            if parameter.kind is parameter.VAR_POSITIONAL:
                self._rest = slot
            elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                slots.append(slot)
                self._least += parameter.default is parameter.empty
            else:
                raise TypeError(f"argument {parameter.name!r} of {self.name} is none that is passed by its place")
        self._slots = slots
        plain = [slot.plain for slot in slots]
        # By the number of arguments, of which some have defaults.
        self._fixed = {count: tuple[tuple(plain[:count])] for count in range(self._least, len(slots) + 1)}  # type: ignore[misc]
        self._others = None if self._rest is None else list[self._rest.plain]  # type: ignore[name-defined]
        # Whether there are plain values only.
        every = [*slots, *filter(None, [self._rest])]
        self._flat = not any(slot.packed or slot.tensor or slot.reference for slot in every)
        answer = hints.get("return")
        # None: the code that uses the answer checks it.
        self._answer = tuple[_limited(answer)] if answer in _SCALARS or answer is str else None  # type: ignore[misc]  # made here

    def read(self, arguments: Values, names: Sequence[object] | None = None) -> Values:
        """The arguments of a call, by the declaration; tensors and references are still missing in their places.

        names: of keyword arguments. Raises ProtocolError for a call that does not fit the declaration.
        """
        values = arguments.values
        tensors_at, table, references = arguments.tensors_at, arguments.table, arguments.references
        if _is_pickled(arguments):
            raise self._refusal("values that are pickled, or written as a tree")
        if arguments.gradients is not None:
            raise self._refusal("tensors with a past in an autograd context")
        if names:
            raise self._refusal("keyword arguments")
        count, fixed = len(values), min(len(values), len(self._slots))
        if count < self._least or (count > fixed and self._others is None):
            raise self._refusal(f"{count} arguments")
        read: list[object] = [*self._convert(values[:fixed], self._fixed[fixed], 0)]
        if count > fixed:
            read += self._convert(values[fixed:], self._others, fixed)
        if self._flat:
            if tensors_at or table or references:
                raise self._refusal("tensors or references")
            return replace(arguments, values=read)
        self._check_places(arguments, read)
        return replace(arguments, values=read)

    def _check_places(self, arguments: Values, read: list[object]) -> None:
        """Unpack what is packed, and raise ProtocolError for tensors and references where none are declared."""
        tensors_at, table, references, count = arguments.tensors_at, arguments.table, arguments.references, len(read)
        taken = {
            **dict.fromkeys(self._places(tensors_at, len(table or ()), count, "tensors"), "tensor"),
            **dict.fromkeys(self._places([each.position for each in references], -1, count, "references"), "reference"),
        }
        if len(taken) < len(tensors_at) + len(references):
            raise self._refusal("two values in one place")
        for position, value in enumerate(read):
            slot = self._slot_of(position)
            what = taken.get(position)
            if what is not None:
                if value is not None or not (slot.tensor if what == "tensor" else slot.reference):
                    raise self._refusal(f"a {what} as argument {self._shown(position)}")
            elif value is None and not slot.optional:
                raise self._refusal(f"nothing as argument {self._shown(position)}")
            elif slot.packed is not None:
                read[position] = self._unpack(slot.packed, value, position)

    def check_answer(self, answer: Values) -> None:
        """Raise ProtocolError for an answer with a pickle or of another type."""
        if _is_pickled(answer) or answer.gradients is not None:
            raise ProtocolError(f"{self.name} of the runtime has answered with what is pickled, or written as a tree")
        if self._answer is not None:
            try:
                msgspec.convert(answer.values, self._answer, strict=True, builtin_types=_BUILTIN)
            except msgspec.ValidationError as error:
                raise ProtocolError(f"{self.name} of the runtime has answered with something else: {error}") from None

    def _slot_of(self, position: int) -> _Slot:
        if position < len(self._slots):
            return self._slots[position]
        assert self._rest is not None, "there are no more values than are declared"
        return self._rest

    def _convert(self, values: list[object], declared: object, first: int) -> Sequence[object]:
        try:
            read: Sequence[object] = msgspec.convert(values, declared, strict=True, builtin_types=_BUILTIN)
        except msgspec.ValidationError as error:
            # "Expected `int`, got `str` - at `$[1]`"
            text, _, path = str(error).partition(" - at ")
            place = path[3:].partition("]")[0]
            position = first + int(place) if place.isdecimal() else -1
            if position < 0:
                raise self._refusal(text) from None
            raise self._refusal(f"argument {self._shown(position)}: {text}") from None
        return read

    def _unpack(self, decoder: msgspec.msgpack.Decoder[T], value: Any, position: int) -> T:
        try:
            return decoder.decode(value)
        except msgspec.MsgspecError as error:  # its text has no values
            raise self._refusal(f"argument {self._shown(position)}: {error}") from None
        except (RecursionError, ValueError) as error:
            raise self._refusal(f"argument {self._shown(position)}: {type(error).__name__}") from None

    def _places(self, places: Sequence[Any], described: int, count: int, what: str) -> Sequence[int]:
        """Check the places of tensors or references among the values, and return them. described: their number; -1:
        any."""
        if (
            described not in (-1, len(places))
            or len(set(map(type, places)) | {int}) > 1
            or len({*places}) < len(places)
        ):
            raise self._refusal(f"{what} that have no place")
        if places and not 0 <= min(places) <= max(places) < count:
            raise self._refusal(f"{what} that have no place")
        return places

    def _shown(self, position: int) -> str:
        return f"{position + 1} ({self._slot_of(position).name})"

    def _refusal(self, what: str) -> ProtocolError:
        return ProtocolError(f"{self.name} of the runtime was called with what it does not take: {what}")


def _slot(function: str, name: str, annotation: object) -> _Slot:
    options = list(get_args(annotation)) if get_origin(annotation) in (Union, types.UnionType) else [annotation]
    tensor = Tensor in options
    references = [each for each in options if hasattr(get_origin(each) or each, "_travel")]
    plain = [each for each in options if each is not Tensor and each not in references]
    kinds = [_kind(function, name, each) for each in plain]
    optional = type(None) in plain
    carrier = tensor or bool(references)
    if any(kind in _CONTAINERS or kind is msgspec.Struct for kind in kinds):
        if carrier:
            raise TypeError(f"argument {name!r} of {function} is a container, or a tensor, and it cannot be both")
        whole = reduce(or_, map(_limited, plain))
        return _Slot(name, bytes, msgspec.msgpack.Decoder(whole, strict=True), False, False, False)
    plain = [_limited(each) for each in plain]
    if carrier and not optional:
        plain.append(type(None))  # in its place
    whole = reduce(or_, plain)
    return _Slot(name, whole, None, tensor, bool(references), optional)


def _kind(function: str, name: str, annotation: object) -> object:
    """The class of an annotation that is no union. TypeError for an unknown one."""
    inner = annotation
    while get_origin(inner) is Annotated:
        inner = get_args(inner)[0]
    if inner in _SCALARS or inner is str:
        return inner
    if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
        if not inner.__struct_config__.array_like:
            raise TypeError(f"{inner.__name__}, an argument of {function}, is not array_like")
        for declared in get_type_hints(inner, include_extras=True).values():
            _check_all(function, name, declared)
        return msgspec.Struct
    origin = get_origin(inner)
    if origin in _CONTAINERS:
        for each in get_args(inner):
            if each is not Ellipsis:
                _check_all(function, name, each)
        return origin
    raise TypeError(f"argument {name!r} of {function} is declared as {annotation!r}, which is not read here")


def _check_all(function: str, name: str, annotation: object) -> None:
    union = get_origin(annotation) in (Union, types.UnionType)
    for each in get_args(annotation) if union else (annotation,):
        _kind(function, name, each)


def _limited(annotation: object) -> Any:
    """The annotation, with the default limit for texts."""
    return _Text if annotation is str else annotation


_declarations = "_aiorpc_declaration"


def declaration_of(function: Callable[..., object]) -> Declaration:
    """The declaration of a handler, made once. TypeError for wrong annotations."""
    found: Declaration | None = function.__dict__.get(_declarations)
    if found is None:
        found = Declaration(function)
        setattr(function, _declarations, found)
    return found


def _is_pickled(said: Values) -> bool:
    """Whether a message has pickled values, or values in the safe encoding."""
    return said.pickled is not None or bool(said.opaque_at) or bool(said.buffers)
