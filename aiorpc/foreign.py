"""Safe handling of exceptions of users' classes.

Such a class can redefine how it is shown, copied and compared, and how its attributes are read and set; each of these
can raise, even SystemExit. The functions here bypass all of that, for code that must not fail.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Mapping
from types import MemberDescriptorType, TracebackType
from typing import Any

_MADE_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE, which the exceptions of the interpreter itself do not have
# The interpreter's own descriptors, which no class can redefine.
_FIELDS: dict[str, Any] = {
    name: BaseException.__dict__[name] for name in ("args", "__cause__", "__context__", "__traceback__", "__dict__")
}
# The same of classes, which no metaclass can redefine.
_OF_CLASS: dict[str, Any] = {name: type.__dict__[name] for name in ("__flags__", "__mro__", "__base__", "__dict__")}


def is_a(error: object, kind: type[BaseException] | tuple[type[BaseException], ...]) -> bool:
    """As ``isinstance``, which would ask the object for its ``__class__``."""
    return issubclass(type(error), kind)


def name_of(error: BaseException) -> str:
    """The name of its type. Never raises."""
    try:
        return str(type.__dict__["__name__"].__get__(type(error)))
    except Exception:  # the name is not a str
        return "an exception"


def text_of(error: BaseException) -> str:
    """``str(error)``, or a note that it failed. Never raises."""
    try:
        return "" + str(error)  # an instance of a subclass of str becomes a plain str
    except BaseException as broken:
        return f"<its text cannot be made: {name_of(broken)}>"


def said(error: BaseException) -> str:
    """Type and text, for a sentence. Never raises."""
    return f"{name_of(error)}: {text_of(error)}"


def traceback_of(error: BaseException) -> str:
    """The printed traceback, or a note that it failed. Never raises."""
    try:
        return "".join(traceback.format_exception(error))
    except BaseException as broken:
        return f"{said(error)}\n<its traceback cannot be made: {name_of(broken)}>"


def field(error: BaseException, name: str) -> Any:
    """Its ``args``, ``__cause__``, ``__context__``, ``__traceback__`` or ``__dict__``."""
    return _FIELDS[name].__get__(error)


def set_cause(error: BaseException, cause: BaseException | None) -> None:
    """As ``raise error from cause`` does."""
    _FIELDS["__cause__"].__set__(error, cause)


def set_args(error: BaseException, args: tuple[Any, ...]) -> None:
    """As ``error.args = args`` does."""
    _FIELDS["args"].__set__(error, args)


def with_traceback(error: BaseException, trace: TracebackType | None) -> BaseException:
    """Set the traceback of an error and return it."""
    return BaseException.with_traceback(error, trace)


def add_note(error: BaseException, note: str) -> None:
    """As `error.add_note(note)`, if it accepts one."""
    with contextlib.suppress(BaseException):
        BaseException.add_note(error, note)


def copy_of(error: BaseException, kind: type[BaseException] | None = None) -> BaseException | None:
    """An equal error without traceback, made without running its class's code; None if that is impossible.

    kind: another type for it, a subclass of its own.
    """
    kind = type(error) if kind is None else kind
    try:
        base: Any = base_of(kind)
        args = base.__reduce__(error)[1]  # may have more than ``args``
        twin: BaseException = base.__new__(kind, *args)
        base.__init__(twin, *args)
        field(twin, "__dict__").update(field(error, "__dict__"))
        for slot in slots_of(type(error)).values():
            with contextlib.suppress(AttributeError):  # it is empty
                slot.__set__(twin, slot.__get__(error))
        for member in members_of(base).values():  # such as `ImportError.name`, which is not among ``args``
            value = member.__get__(error)
            if value is not None:
                with contextlib.suppress(AttributeError):  # it cannot be changed
                    member.__set__(twin, value)
        set_cause(twin, field(error, "__cause__"))
    except Exception:  # its constructor takes other arguments
        return None
    return twin


def log_error(
    logger: logging.LoggerAdapter[logging.Logger], level: int, error: BaseException, message: str, *args: object
) -> None:
    """Log a message with the traceback of an error. Never raises, even if showing the error fails."""
    try:
        logger.log(level, message, *args, exc_info=error)
    except BaseException:
        with contextlib.suppress(BaseException):  # a log handler of the program fails
            logger.log(level, f"{message}\n%s", *args, traceback_of(error))


# --- of what an exception is made -------------------------------------------------------------------------------------


def base_of(kind: type[BaseException]) -> type[BaseException]:
    """The interpreter's own exception class that `kind` inherits from, which determines its layout."""
    while _made_in_python(kind):
        kind = _OF_CLASS["__base__"].__get__(kind)
    return kind


def _made_in_python(kind: type) -> bool:
    return bool(_OF_CLASS["__flags__"].__get__(kind) & _MADE_IN_PYTHON)


def classes_of(kind: type) -> list[type]:
    """`kind` and its base classes, without the interpreter's own."""
    return [each for each in _OF_CLASS["__mro__"].__get__(kind) if _made_in_python(each)]


def names_of(kind: type) -> Mapping[str, Any]:
    """The attributes that the class itself defines."""
    names: Mapping[str, Any] = _OF_CLASS["__dict__"].__get__(kind)
    return names


def members_of(kind: type) -> dict[str, Any]:
    """The class's fields outside of the instance's ``__dict__``, by their names."""
    return {name: member for name, member in names_of(kind).items() if type(member) is MemberDescriptorType}


def slots_of(kind: type) -> dict[str, Any]:
    """The slots of its classes, by their names."""
    slots: dict[str, Any] = {}
    for each in reversed(classes_of(kind)):
        slots.update(members_of(each))
    return slots
