"""What a call names, at its callee: functions by number, by name or by value, methods and values of references.

Finding it may take an import, or wait until a value exists; the service then starts the call (`Service.start`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import ProtocolError, RpcUsageError
from ...futures import AnyFuture, outcome, when_done
from ...protocol.frames import Buffer
from ..calls import functions
from ..calls.functions import Target
from ..engine.current import CallContext

if TYPE_CHECKING:
    from .service import Service

# What the wire form of a call begins with that names no function: the value of a reference, or a method of it.
FETCH, METHOD = "f", "m"


class Resolver:
    """Of one connection. On the loop, except where it says otherwise."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._worker = service.worker
        self._functions: dict[int, Target] = {}
        self._methods: dict[tuple[type, str, object], Target] = {}

    def is_system(self, wire: Any) -> bool:
        """Whether a call is the runtime's own: users' many calls must not refuse leaving and news of losses."""
        if type(wire) is int:
            target = self._functions.get(wire)
            return target is not None and target.system
        name = wire[1] if type(wire) is list and len(wire) == 2 else ""
        return name.startswith("aiorpc.runtime.") and functions.is_loaded(name) and functions.resolve(name).system

    def route(self, wire: Any, context: CallContext, fields: list[Any], segments: Sequence[Buffer]) -> None:
        """Find what the call names, and have it started; now, or once it is there. Raises for what cannot be."""
        target: Target | None = None
        if type(wire) is int:
            target = self._functions.get(wire)
            if target is None:
                raise ProtocolError(f"function number {wire} was never named")
        elif wire is None:  # by value: it comes out of the arguments, which may take long
            self._worker.background.submit(self._unpack_function, context, fields, segments)
            return
        elif wire[0] == FETCH:
            context.function = "to_here"
            self._fetch(wire, context)
            return
        elif wire[0] == METHOD:
            context.function = f"{wire[3]} of a reference"
            self._resolve_method(wire, context, fields, segments)
            return
        else:
            number, name = wire
            target = self._functions.get(number)
            if target is None:
                context.function = name
                if not functions.is_loaded(name):
                    self._worker.background.submit(self._import, wire, context, fields, segments)
                    return
                target = self._functions[number] = functions.resolve(name)
        self._service.start(target, context, fields, segments)

    def _import(self, wire: Any, context: CallContext, fields: list[Any], segments: Sequence[Buffer]) -> None:
        """In the pool: the function's module has to be imported first."""
        number, name = wire
        try:
            target = functions.resolve(name)
        except BaseException as error:  # a module may exit as it is imported
            self._worker.call_on_loop(self._service.discard_arguments, fields)
            self._service.answer_error(context, error)
            return
        self._functions[number] = target
        self._worker.call_on_loop(self._service.start, target, context, fields, segments)

    def _unpack_function(self, context: CallContext, fields: list[Any], segments: Sequence[Buffer]) -> None:
        """In the pool: the function came by value, as the first argument."""
        try:
            values = self._service.decode(context, fields, segments)
            function = values.pop(0)
            if not callable(function):
                raise RpcUsageError(f"{type(function).__qualname__} is not callable")
            target = functions.classify(function, functions.describe(function))
        except BaseException as error:
            self._service.answer_error(context, error)
            return
        self._worker.call_on_loop(self._service.start, target, context, [*fields[:5], values], ())

    def _fetch(self, wire: list[Any], context: CallContext) -> None:
        """The value of a reference, once it is there."""
        value = self._worker.references.value(wire[1], wire[2], self._service.peer.id)
        when_done(value, partial(self._service.answer_future, context, False))

    def _resolve_method(
        self, wire: list[Any], context: CallContext, fields: list[Any], segments: Sequence[Buffer]
    ) -> None:
        """A method of a reference's value, once that is there."""
        value = self._worker.references.value(wire[1], wire[2], self._service.peer.id)
        when_done(value, partial(self._found_value, wire[3], context, fields, segments))

    def _found_value(
        self, name: str, context: CallContext, fields: list[Any], segments: Sequence[Buffer], future: AnyFuture
    ) -> None:
        value, error = outcome(future)
        if error is not None:
            self._service.refuse(context, fields, error)
            return
        context.arrival = getattr(future, "_arrival", None)
        attribute = functions.find_method(type(value), name)
        if attribute is not None:
            self._call_method(value, name, attribute, context, fields, segments)
        else:  # a property or the like: users' code, which may take its time
            self._worker.pool.submit(self._call_method, value, name, None, context, fields, segments)

    def _call_method(
        self,
        value: object,
        name: str,
        attribute: object,
        context: CallContext,
        fields: list[Any],
        segments: Sequence[Buffer],
    ) -> None:
        try:
            method = getattr(value, name)
            target = self._methods.get((type(value), name, attribute))
            if target is None:
                if not callable(method):
                    raise RpcUsageError(f"{name!r} of {type(value).__qualname__} is not callable")
                target = functions.classify(method, f"{type(value).__qualname__}.{name}")
                if attribute is not None:
                    self._methods[type(value), name, attribute] = target._replace(function=len)  # not this value's
            else:
                target = target._replace(function=method)
        except BaseException as failure:
            self._service.refuse(context, fields, failure)
            return
        self._worker.run_on_loop(self._service.start, target, context, fields, segments)
