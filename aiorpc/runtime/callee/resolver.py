"""Finds the function of a call: by number, by name or by value, as a method of an object, or the value of a reference.

Finding it may take an import, or a wait for the value of a reference. Then the call is started (`Runner.start`). Calls
beyond the caller's rights are refused here, before anything is imported or unpickled: functions are checked once, when
they get their number, and methods once for each class. An object is the value of a reference, or is served under a
name; its methods are found in the same way.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

from ...errors import Overloaded, ProtocolError, RpcUsageError, SerializationError
from ...futures import AnyFuture, Future, outcome, when_done
from ...protocol.identity import WorkerRecord
from ...protocol.messages import ByName, Fetch, Function, Method, ObjectMethod, Values
from ...rights import FETCH, is_public
from ..calls import functions
from ..calls.current import ServedCall
from ..calls.functions import Handler, Mode
from ..calls.permits import Permits
from ..engine.engine import Engine
from .answers import Answers
from .objects import Objects
from .running import Runner
from .served_calls import ServedCalls
from .standing import Found

# Functions that one caller may number; each is kept as long as the connection.
MOST_FUNCTIONS = 65_536


class ReferencesForResolver(Protocol):
    """The values that this worker owns (`References`)."""

    def value(self, worker: int, number: int, key: int, asker: int = -1) -> Future[object]:
        """The Future of the value of a reference, which need not exist yet. asker: the id of the caller."""


class Resolver:
    """Finds the functions of one connection's calls. On the loop, unless a method says otherwise.

    functions: by the numbers that the caller gave them.
    """

    def __init__(
        self,
        engine: Engine,
        answers: Answers,
        served: ServedCalls,
        runner: Runner,
        references: ReferencesForResolver,
        objects: Objects,
        caller: WorkerRecord,
        permits: Permits | None,
    ) -> None:
        """caller: its record. permits: its rights; None without limits."""
        self._engine = engine
        self._answers = answers
        self._served = served
        self._runner = runner
        self._references = references
        self._objects = objects
        self._caller = caller.id
        self._caller_name = caller.name
        self._permits = permits
        self.functions: dict[int, Handler] = {}
        self._methods: dict[tuple[type, str, object], Handler] = {}
        self._methods_by_name: dict[tuple[type, str, object], Handler] = {}  # rights are checked for each call of these

    def is_system(self, function: Function) -> bool:
        """Whether a call is the runtime's own. Such calls are served even if users' calls are too many.

        Otherwise many calls of users would delay departures and reports of losses.
        """
        handler = self._of_runtime(function)
        return handler is not None and handler.system

    def is_brief(self, function: Function) -> bool:
        """Whether a call announces an end: it runs at once, and is never refused (`functions.brief`)."""
        handler = self._of_runtime(function)
        return handler is not None and handler.mode is Mode.BRIEF

    def is_of_queue(self, function: Function) -> bool:
        """Whether a call is one of a queue's, which itself decides what it takes while this worker leaves."""
        if type(function) is not ObjectMethod:
            return False
        served = self._objects.by_name.get(function.object)
        return served is not None and functions.rights_of(type(served._value), function.name) is not None

    def _of_runtime(self, function: Function) -> Handler | None:
        """The handler of a call if it is one of the runtime's or has a known number."""
        if type(function) is int:
            return self.functions.get(function)
        name = function.name if type(function) is ByName else ""
        if not name.startswith("aiorpc."):
            return None
        if self._permits is not None:
            place = functions.find_place(name, ask=False)
            if place is None or place.within is not None or not functions.is_intrinsic(place.found):
                return None
            return functions.classify(place.found, name)
        return functions.resolve(name) if functions.is_loaded(name) else None

    def for_threads(self, function: Function) -> Found | None:
        """The handler and value of a call that can start at once in any thread; None for other calls. Any thread."""
        value = attribute = arrival = None
        if type(function) is int:
            handler = self.functions.get(function)
        elif type(function) is Method:
            future = self._references.value(function.worker, function.number, function.key, self._caller)
            if not future.done():
                return None
            value, error = outcome(future)
            if error is not None:
                return None
            arrival = getattr(future, "_arrival", None)
            attribute = functions.find_method(type(value), function.name)
            handler = self._methods.get((type(value), function.name, attribute))
        else:
            return None
        if handler is None or not handler.mode.any_thread or handler.system:
            return None
        return Found(handler.mode, value, attribute, arrival)

    def name(self, function: Function) -> str:
        """The name of a call's function, for errors of calls that are not run."""
        match function:
            case ByName(_, name):
                return name
            case Method(_, _, _, name):
                return f"{name} of a reference"
            case ObjectMethod(of, name):
                return f"{of}.{name}"
            case Fetch():
                return FETCH
            case int():
                handler = self.functions.get(function)
                return f"function number {function}" if handler is None else handler.name
        return "a function that came by value"

    def route(self, function: Function, call: ServedCall, found: Found | None = None) -> None:
        """Find the function of a call without a known number, and start the call then.

        found: the earlier result of `for_threads`. Raises if there is no function; the calling code answers with the
        error.
        """
        if type(function) is int:
            raise ProtocolError(f"function number {function} was never named")
        match function:
            case ByName(number, name):
                handler = self.functions.get(number)
                if handler is None:
                    call.function = name
                    if len(self.functions) >= MOST_FUNCTIONS:
                        raise Overloaded(
                            f"{self._caller_name!r} has named {MOST_FUNCTIONS} functions to worker "
                            f"{self._engine.name!r}, which takes no more of them; {name:.130} was not run"
                        )
                    if not functions.is_loaded(name) and (self._permits is None or self._permits.may_import(name)):
                        self._engine.background.submit(self._import, number, name, call)
                        return
                    handler = self.functions[number] = self._find(name)
                self._runner.start(call, handler)
            case Method(worker, number, key, name):
                call.function = f"{name} of a reference"
                if found is not None:
                    call.arrival = found.arrival
                    self._call_method(found.value, name, found.attribute, call)
                    return
                value = self._references.value(worker, number, key, self._caller)
                if value.done():
                    self._found_value(name, call, value)
                else:
                    when_done(value, partial(self._found_value, name, call))
            case ObjectMethod(of, name):
                call.function = f"{of}.{name}"
                served = self._objects.find(of, name, self._caller_name, tell=self._permits is None)
                if not is_public(name):
                    raise RpcUsageError(f"{name:.130} of the object {of!r} is private: an object serves public methods")
                self._call(name, call, served, of)
            case Fetch(worker, number, key):
                self._served.fetch(call)
                value = self._references.value(worker, number, key, self._caller)
                plain = self._permits is None and call.autograd is None
                answer = partial(self._answers.answer_future, call, False)
                when_done(value, answer if plain else partial(self._fetch, worker, call))
            case _ if self._engine.safe:
                raise SerializationError(
                    f"worker {self._engine.name!r} runs no function that is sent by value: it uses safe serialization"
                )
            case _:  # by value: unpickled with the arguments, which may take long
                call.function = self.name(function)
                if self._permits is not None:
                    self._permits.check_by_value()
                self._engine.background.submit(self._unpack_function, call)

    def _find(self, name: str) -> Handler:
        if self._permits is not None:
            return self._permits.find(name)
        return functions.resolve(name, where=f"worker {self._engine.name!r}")

    def _import(self, number: int, name: str, call: ServedCall) -> None:
        """In a background thread, because importing the function's module may take long."""
        try:
            handler = self._find(name)
        except BaseException as error:  # an imported module may raise SystemExit
            self._runner.refuse(call, error)
            return
        self.functions[number] = handler  # the loop reads it; setting a key is atomic
        self._engine.call_on_loop(self._runner.start, call, handler)

    def _unpack_function(self, call: ServedCall) -> None:
        """In a background thread: unpickle the function, which is the first argument."""
        try:
            if call.autograd is not None and (refusal := self._answers.enter(call)) is not None:
                raise refusal
            values = self._runner.decode(call)
            function = values.pop(0)
            if not callable(function):
                raise RpcUsageError(f"{type(function).__qualname__} is not callable")
            handler = functions.classify(function, functions.describe(function))
        except BaseException as error:
            self._answers.answer_error(call, error)
            return
        call.drop_arguments()
        call.arguments = Values(values)  # decoded already
        self._engine.call_on_loop(self._runner.start, call, handler)

    def _fetch(self, creator: int, call: ServedCall, future: AnyFuture) -> None:
        """Answer a fetch whose value is there, for a caller with limits or in an autograd context."""
        value, error = outcome(future)
        if error is None and self._permits is not None:
            try:
                self._permits.check_value(value, creator)
            except Exception as refusal:
                self._runner.refuse(call, refusal)
                return
        if call.autograd is not None and (failure := self._answers.enter(call)) is not None:
            self._runner.refuse(call, failure)
            return
        self._answers.answer_future(call, False, future)

    def _found_value(self, name: str, call: ServedCall, future: AnyFuture) -> None:
        value, error = outcome(future)
        if error is not None:
            self._runner.refuse(call, error)
            return
        call.arrival = getattr(future, "_arrival", None)
        attribute = functions.find_method(type(value), name)  # `_call`, inlined
        if attribute is not None:
            self._call_method(value, name, attribute, call)
            return
        try:
            self._look_up(name, call, value, "")
        except Exception as failure:  # there is no thread; a Future's settler does not answer calls
            self._runner.refuse(call, failure)

    def _call(self, name: str, call: ServedCall, value: object, of: str) -> None:
        """Run a method of a value, which is served under the name `of`."""
        attribute = functions.find_method(type(value), name)
        if attribute is not None:
            self._call_method(value, name, attribute, call, of)
        else:
            self._look_up(name, call, value, of)

    def _look_up(self, name: str, call: ServedCall, value: object, of: str) -> None:
        """Look up and run an attribute that is no method of the class, in the pool: a property runs users' code."""
        self._runner.share.submit(partial(self._call_looked_up, value, name, of), call, self._runner.refuse)

    def _call_looked_up(self, value: object, name: str, of: str, call: ServedCall) -> None:
        self._call_method(value, name, None, call, of)

    def _call_method(self, value: object, name: str, attribute: object, call: ServedCall, of: str = "") -> None:
        try:
            by_name = bool(of) and self._permits is not None  # the rights also depend on the object's name
            # An instance's own attribute hides the method of its class.
            of_class = attribute is not None and name not in getattr(value, "__dict__", ())
            known = self._methods_by_name if by_name else self._methods
            handler = known.get((type(value), name, attribute)) if of_class else None
            if by_name:
                assert self._permits is not None, "else nothing is asked"
                self._permits.check_object(of, value, name)
            elif handler is None and self._permits is not None:
                self._permits.check_method(value, name)
            method = getattr(value, name)
            if handler is None:
                if attribute is None and self._permits is not None:
                    self._permits.check_attribute(value, name, method, of)
                if not callable(method):
                    raise RpcUsageError(f"{name!r} of {type(value).__qualname__} is not callable")
                handler = functions.classify(method, f"{type(value).__qualname__}.{name}")._replace(method=name)
                if of_class:
                    # Kept without the method, which would keep this value alive.
                    known[type(value), name, attribute] = handler._replace(function=len)
            else:
                handler = Handler(method, *handler[1:])
        except BaseException as failure:
            self._runner.refuse(call, failure)
            return
        if handler.mode.any_thread:
            self._runner.start(call, handler)
        else:
            self._engine.run_on_loop(self._runner.start, call, handler)
