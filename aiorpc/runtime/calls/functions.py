"""Functions on the wire: their names, how they are found, and how they are run."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from types import FunctionType, MethodDescriptorType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy
import torch
from torch._library.custom_ops import CustomOpDef

from ..._typing import Function
from ...errors import RpcUsageError
from ...protocol.codec import find_main
from ...protocol.main_module import is_main, unite
from ...protocol.messages import ObjectMethod
from ...protocol.registered import MAIN_NAMES
from ...rights import FETCH
from .annotations import declared_in
from .batching import get_batcher
from .declared import Declaration, declaration_of

F = TypeVar("F", bound=Callable[..., object])
if TYPE_CHECKING:
    Later = torch.futures.Future[Any]
    ReturnsFuture = Callable[..., Later] | staticmethod[..., Later] | classmethod[Any, ..., Later]
#: A function that returns a Future of torch or aiorpc; also as a static or class method.
G = TypeVar("G", bound="ReturnsFuture")
T = TypeVar("T")

_DEFERRED = "_aiorpc_async_execution"
_SYSTEM = "_aiorpc_system"
_CARRIES = "_aiorpc_carries"
_INLINE = "_aiorpc_inline"
_BRIEF = "_aiorpc_brief"
_INTRINSIC = "_aiorpc_intrinsic"
_MARKS = (_SYSTEM, _INLINE, _BRIEF, _INTRINSIC)
_RESOURCE = "_aiorpc_resource"
_BY_RIGHT = "_aiorpc_by_right"
_OPERATORS = "torch._ops"  # the module of the classes of `torch.ops`
_WILD = re.compile(r"[*?\[]")
_Missing = type("_Missing", (), {})  # a marker, where None is a value


class Mode(Enum):
    """How a handler is run. any_thread: whether any thread may start it, because it is answered once and needs no
    loop."""

    any_thread: bool

    THREAD = "thread"
    COROUTINE = "coroutine"
    DEFERRED = "async_execution"
    GENERATOR = "generator"
    ASYNC_GENERATOR = "async generator"
    BATCHED = "batched"
    INLINE = "inline"
    BRIEF = "brief"

    def __init__(self, value: str) -> None:
        self.any_thread = value in ("thread", "async_execution", "batched", "brief")


class Handler(NamedTuple):
    """A function that serves calls.

    system: whether it belongs to the runtime and does not count as users' work. declared: the decoder of its arguments,
    if it is one of the runtime's. wrapper: whether it is a plain function that wraps a generator function
    (`functools.wraps`): only its result shows whether it yields items. method: the name of a method called through a
    reference or a named object; empty otherwise.
    """

    function: Callable[..., object]
    mode: Mode
    name: str
    system: bool = False
    declared: Declaration | None = None
    wrapper: bool = False
    method: str = ""


def async_execution(fn: G) -> G:
    """Mark a handler that returns a Future: its thread is free at once, the reply goes out when the Future completes.

    The function must return a ``torch.futures.Future`` of any kind. With ``@staticmethod`` and ``@classmethod`` it may
    be written on either side.

    Raised here: RpcUsageError for an ``async def``, which needs no mark, for a generator function, and for what is no
    function.
    """
    target: object = fn.__func__ if isinstance(fn, (staticmethod, classmethod)) else fn
    if not callable(target):
        raise RpcUsageError(f"async_execution decorates a function that returns a Future, not {target!r:.80}")
    match _kind_of(_without_partials(target)):
        case None:
            pass
        case Mode.COROUTINE:
            raise RpcUsageError(
                f"{describe(target)} is an `async def`, which needs no decorator: leave @async_execution away; its "
                "caller gets what it returns, and it holds no thread while it waits"
            )
        case _:
            raise RpcUsageError(
                f"{describe(target)} is a generator function: it is called with aiorpc.stream, and returns no Future; "
                "leave @async_execution away"
            )
    try:
        setattr(target, _DEFERRED, True)
    except AttributeError as error:
        raise RpcUsageError(
            f"{describe(target)} takes no attribute, and so no mark: decorate a `def` that calls it"
        ) from error
    return fn


def system(fn: F) -> F:
    """Mark a handler that belongs to the runtime."""
    setattr(fn, _SYSTEM, True)
    return fn


def carries(fn: F) -> F:
    """Mark a handler that belongs to the runtime, and answers with values or errors of users' code."""
    setattr(fn, _CARRIES, True)
    return fn


def inline(fn: F) -> F:
    """Mark a plain function of the runtime's that never waits: it runs on the loop, between two frames.

    It may return a Future of the loop, whose result is the answer; the Future is cancelled if the caller gives up.
    """
    setattr(fn, _INLINE, True)
    return fn


def brief(fn: F) -> F:
    """Mark such a function that needs no loop: the thread that has read its call runs it at once.

    It announces an end, once: it runs however many other calls there are, also while a worker leaves. Call it with
    ``system`` of `Peer.call`.
    """
    setattr(fn, _BRIEF, True)
    return fn


def intrinsic(fn: F) -> F:
    """Mark a handler of the runtime that runs no code of its caller's choice: it needs no rights.

    Handlers marked with `system`, `inline` or `brief` are intrinsic, too. Their annotations decode their arguments
    (`declared`).
    """
    setattr(fn, _INTRINSIC, True)
    return fn


def resource(kind: str) -> Callable[[type[T]], type[T]]:
    """Mark a class of the runtime's whose objects are served under names and have rights of their own.

    kind: as in `rights.RESOURCES`. Only methods marked with `by_right` can be called.
    """

    def mark(cls: type[T]) -> type[T]:
        setattr(cls, _RESOURCE, kind)
        return cls

    return mark


def by_right(*verbs: str) -> Callable[[F], F]:
    """Mark a method of such a class: a caller with the right to one of those verbs may call it.

    A method that ends or takes back the work of other methods has several verbs. Its annotations decode its arguments
    (`declared`).
    """

    def mark(fn: F) -> F:
        setattr(fn, _BY_RIGHT, verbs)
        return fn

    return mark


def rights_of(kind: type, method: str) -> tuple[str, Sequence[str]] | None:
    """The kind of a class in `rights.RESOURCES`, and the verbs that allow that method; None for other classes."""
    if not kind.__module__.startswith("aiorpc.") or _RESOURCE not in kind.__dict__:
        return None
    found = find_method(kind, method)
    verbs: Sequence[str] = found.__dict__.get(_BY_RIGHT, ()) if isinstance(found, FunctionType) else ()
    return kind.__dict__[_RESOURCE], verbs


def is_intrinsic(function: object) -> bool:
    """Whether a function is a handler of the runtime that every member may call."""
    return _is_marked(function, _MARKS)


def is_declared(function: Function) -> bool:
    """Whether a function is a handler of the runtime, whose annotations decode its arguments."""
    return _is_marked(function, (*_MARKS, _BY_RIGHT))


def answers_plainly(function: object) -> Declaration | None:
    """The declaration of a handler that every member may call and that answers with no values of users (`carries`)."""
    plain = is_intrinsic(function) and not _is_marked(function, (_CARRIES,))
    return declaration_of(function) if plain else None  # type: ignore[arg-type]  # marked, so a function


def _is_marked(function: object, marks: Iterable[str]) -> bool:
    return (
        isinstance(function, FunctionType)
        and function.__module__.startswith("aiorpc.")
        and any(mark in function.__dict__ for mark in marks)
    )


def classify(function: Callable[..., object], name: str) -> Handler:
    """How a callable has to be run. RpcUsageError if it cannot be."""
    written = _without_partials(function)
    inner = written if isinstance(written, type) else _without_partials(inspect.unwrap(written))
    kind = _kind_of(written)
    wrapper = kind is None and _kind_of(inner) in (Mode.GENERATOR, Mode.ASYNC_GENERATOR)
    if get_batcher(function) is not None:
        mode = Mode.BATCHED
    elif isinstance(function, functools.partial) and get_batcher(inner) is not None:
        raise RpcUsageError(f"{name} is a functools.partial of a @batched function: call that function itself")
    elif getattr(function, _INLINE, False):
        mode = Mode.INLINE
    elif getattr(function, _BRIEF, False):
        mode = Mode.BRIEF
    elif getattr(function, _DEFERRED, False) or getattr(inner, _DEFERRED, False):
        mode = Mode.DEFERRED
    else:
        # A wrapper of a coroutine function starts in a thread: it may block for the coroutine instead of returning it.
        mode = (_kind_of(inner) if wrapper else kind) or Mode.THREAD
    declared = _declared(function)
    return Handler(function, mode, name, bool(getattr(function, _SYSTEM, False)), declared, wrapper)


def _declared(function: Function) -> Declaration | None:
    marked = function.__func__ if type(function) is MethodType else function
    return declaration_of(marked) if is_declared(marked) else None


def _without_partials(function: object) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _kind_of(function: object) -> Mode | None:
    """The mode of a coroutine or generator function; None for plain functions, and for classes, which are called
    alike."""
    if isinstance(function, type):
        return None
    for each in (function, _call_of(function)):
        if inspect.iscoroutinefunction(each):
            return Mode.COROUTINE
        if inspect.isasyncgenfunction(each):
            return Mode.ASYNC_GENERATOR
        if inspect.isgeneratorfunction(each):
            return Mode.GENERATOR
    return None


def _call_of(function: object) -> object:
    return None if inspect.isroutine(function) else getattr(type(function), "__call__", None)  # noqa: B004  # how, not whether


def describe(function: object) -> str:
    """The name of a function, for people."""
    if type(function) is ObjectMethod:
        return f"{function.object}.{function.name}"
    if type(function).__module__ == _OPERATORS:
        return f"torch.ops.{function}"
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    return str(name) if name else repr(function)


def find_name(function: object, same_main: bool) -> str | None:
    """The wire name, ``module:qualname``, under which the callee finds the same function; None if it travels by value.

    same_main: whether caller and callee run the same main module.
    """
    name = name_of(function)
    return None if name is not None and not same_main and name.startswith("__main__:") else name


def name_of(function: object) -> str | None:
    """This worker's own wire name for that function or class; None if it has none."""
    if type(function).__module__ == _OPERATORS:  # their own names are internal
        path = f"ops.{function}"
        return f"torch:{path}" if _lookup("torch", path) is function else None
    # A custom operator has no name itself, and takes the place of its function.
    named = function._init_fn if isinstance(function, CustomOpDef) else function
    module = getattr(named, "__module__", None)
    qualname = getattr(named, "__qualname__", None) or getattr(named, "__name__", None)
    if not isinstance(qualname, str):
        return None
    if module in MAIN_NAMES:
        return f"__main__:{qualname}" if find_main(qualname) == function else None
    if isinstance(module, str) and _lookup(module, qualname) == function:
        return f"{module}:{qualname}"
    # torch's operators name no module, or an internal class, and numpy's (before 2.2) none: look where users find them.
    name = getattr(function, "__name__", "")
    for owner in (torch, torch.nn.functional, torch.linalg, torch.fft, torch.special, numpy):
        if getattr(owner, name, None) is function:
            return f"{owner.__name__}:{name}"
    return None


def normal(name: str) -> str:
    """The same wire name, with ``__main__`` for the main module."""
    module, colon, qualname = name.partition(":")
    return f"__main__:{qualname}" if colon and is_main(module) else name


def _lookup(module: str, qualname: str) -> object:
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def is_loaded(name: str) -> bool:
    """Whether `resolve` needs no import for that name; an import may take long and does not belong on the loop."""
    module = name.partition(":")[0]
    if module in MAIN_NAMES:
        return True
    # Another thread may be in the middle of importing it.
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return module in sys.modules and not getattr(spec, "_initializing", False)


def resolve(name: str, check: Callable[[str], None] | None = None, *, where: str = "the callee") -> Handler:
    """The function of a wire name, imported if need be. RpcUsageError if there is none here.

    check: called with the name after its module is imported, before the look-up; raises if it is not allowed. where:
    this worker, for the text of an error.
    """
    module, _, qualname = name.partition(":")
    try:
        if module and module not in MAIN_NAMES:
            if module not in sys.modules:
                parent = module.rpartition(".")[0]
                if parent:
                    importlib.import_module(parent)
                unite(module)
            importlib.import_module(module)  # waits for another thread's import of it
        if check is not None:
            check(name)
        found = find_main(qualname) if module in MAIN_NAMES else _lookup(module, qualname) if module else None
    except ImportError as error:
        raise RpcUsageError(f"RPC pickler does not serialize {name!r}: {where} cannot import it: {error}") from error
    if not callable(found):
        raise RpcUsageError(
            f"RPC pickler does not serialize {name!r}: {where} has no such function. "
            "Define it in a module that both sides can import."
        )
    return classify(found, name)


class NamedPlace(NamedTuple):
    """The target of a wire name. found: the object. within: the class that has it; None: the module."""

    found: Any
    within: type | None


def find_place(name: str, *, ask: bool) -> NamedPlace | None:
    """The target of a name, without an import and without running code on the way; None if there is none.

    The way leads through classes alone, and not through objects or imported modules of a module. ask: whether the
    ``__getattr__`` of a module may be called.
    """
    module, _, qualname = name.partition(":")
    first, *others = qualname.split(".")
    found: object = _Missing
    for each in MAIN_NAMES if module in MAIN_NAMES else (module,):
        space = sys.modules.get(each)
        if found is _Missing and space is not None:
            found = vars(space).get(first, _Missing)
            if found is _Missing and ask:
                found = getattr(space, first, _Missing)
    within = None
    for part in others:
        if not isinstance(found, type):
            return None
        within, found = found, _in_class(found, part)
    return None if found is _Missing else NamedPlace(found, within)


def leads_astray(name: str) -> bool:
    """Whether the way of a name leads through an object other than a class."""
    parts = name.split(".")
    module = name.partition(":")[0]
    ways = [".".join(parts[:count]) for count in range(1, len(parts))]
    places = [find_place(way, ask=True) for way in ways if way.startswith(f"{module}:")]
    return any(place is not None and not isinstance(place.found, type) for place in places)


def _in_class(kind: type, name: str) -> object:
    return next((base.__dict__[name] for base in kind.__mro__ if name in base.__dict__), _Missing)


def check_pattern(pattern: str) -> None:
    """Raise RpcUsageError if a pattern of the option ``allow`` can match nothing here. Imports nothing.

    A module that is not imported yet need only exist. Attributes of instances alone are unknown.
    """
    module, colon, qualname = pattern.partition(":")
    if not colon or _WILD.search(module):
        return
    if not _is_there(module):
        raise RpcUsageError(f"allow has {pattern!r}, which matches nothing: there is no module {module!r} here")
    if module not in MAIN_NAMES and is_main(module):
        raise RpcUsageError(
            f"allow has {pattern!r}, and {module!r} is the script that runs here: allow '__main__:{qualname}', which "
            "is what that is called, also for workers that import it from there"
        )
    parts = [*itertools.takewhile(lambda part: not _WILD.search(part), qualname.split("."))]
    if not parts or not is_loaded(pattern):
        return
    place = find_place(f"{module}:{'.'.join(parts)}", ask=True)
    if place is None:
        kind = find_place(f"{module}:{'.'.join(parts[:-1])}", ask=True) if len(parts) > 1 else None
        if kind is not None and isinstance(kind.found, type) and _may_have(kind.found, parts[-1]):
            return
        raise RpcUsageError(f"allow has {pattern!r}, which matches nothing: {module!r} has no {'.'.join(parts)!r}")
    true = name_of(place.found) if place.within is None and "." not in qualname else None
    if true is not None and true != normal(pattern) and pattern.endswith(f":{parts[-1]}"):
        raise RpcUsageError(f"allow has {pattern!r}, which is called {true!r} where it is defined: allow that name")


def _is_there(module: str) -> bool:
    if module in MAIN_NAMES or sys.modules.get(module) is not None:
        return True
    parent = module.rpartition(".")[0]
    if parent and parent not in sys.modules:  # a look into it would import it
        return _is_there(parent)
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, AttributeError, ValueError):
        return False


def _may_have(kind: type, name: str) -> bool:
    """Whether instances of a class may have an attribute that the class does not have."""
    asks = _in_class(kind, "__getattr__") is not _Missing
    return name == FETCH or asks or any(name in declared_in(base) for base in kind.__mro__)


def find_method(kind: type, name: str) -> object | None:
    """The function or method of that name in a class; None if the look-up would run code of the user's."""
    for base in kind.__mro__:
        if name in base.__dict__:
            found: object = base.__dict__[name]
            return found if isinstance(found, (FunctionType, classmethod, staticmethod, MethodDescriptorType)) else None
    return None
