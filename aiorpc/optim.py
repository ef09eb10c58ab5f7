"""An optimizer of parameters that live on several workers, with the name of ``torch.distributed.optim``.

    optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss()])
        optimizer.step(context_id)                      # await optimizer.step(ctx), in coroutines

Each owner of parameters has one ordinary optimizer for its own, whose state never leaves it unless asked for. A step is
one call to each owner, all at once; gradients do not travel, as they lie in the context beside their parameters.

`backward_and_step` does both in one: an owner steps as soon as its part of the pass is done, and reports both in one
answer, which saves a round trip.

A step on an owner: it waits for its turn, gives the parameters the gradients of the context, steps, and puts ``.grad``
back. Turns are by parameter: steps with one in common come one after the other, in the order in which they arrived,
also those of different optimizers, as when every trainer has made its own.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self, TypeVar

import torch

from . import foreign
from .autograd.contexts import make_pass
from .autograd.parts import Closing, Part
from .autograd.passes import Last
from .autograd.wire import pack_reference
from .callbacks import block_observer
from .errors import RpcCancelled, RpcError, RpcTimeout, RpcUsageError
from .futures import Future
from .locks import Lock
from .protocol.registered import register_safe
from .runtime.calls.current import check_cancelled, current_call, permits
from .runtime.node import Node, node_of, registry, serving
from .runtime.references.rref import RRef
from .sites import call_site, outside
from .undoing import on_error

__all__ = ["DistributedOptimizer", "NoGradients"]

Tensor = torch.Tensor
T = TypeVar("T")
State = dict[str, Any]


class NoGradients(RpcUsageError):
    """A step without effect: no parameter of the optimizer has a gradient in the context."""


@register_safe
class DistributedOptimizer:
    """One optimizer of class `optimizer_class` on each worker that owns some of the parameters.

    The constructor blocks until all owners have theirs. The object may be used from any thread, by several at once, and
    sent to other workers, which step the same optimizers then. With several parameter groups, make several optimizers.

    optimizer_class: a ``torch.optim`` class, or a similar one. The other arguments go to the class on every owner.
    params_rref: RRefs of leaf tensors of any shape, dtype and layout that the class takes, on any workers, this one
        included; on each owner they keep their order.
    remote_optimizers: an RRef of each owner's part, whose attribute ``optim`` is the ordinary optimizer there. Its
        learning rate is changed in a handler on the owner (``ref.local_value().optim.param_groups``), or by a scheduler
        made there.

    Raised here: WouldBlockLoop on the worker's loop: ``await DistributedOptimizer.create(...)`` there. RpcUsageError if
    there are no parameters, for parameters that are not RRefs, and for an optimizer in place of its class; the class's
    error on an owner, with a note that names the owner; PeerLost, RpcTimeout.
    """

    remote_optimizers: list[RRef[Any]]

    def __init__(
        self, optimizer_class: Callable[..., Any], params_rref: Sequence[RRef[object]], *args: object, **kwargs: object
    ) -> None:
        registry.get().engine.refuse_on_loop("DistributedOptimizer(...)", "await DistributedOptimizer.create(...)")
        self.remote_optimizers = _make(optimizer_class, params_rref, args, kwargs).wait()

    @classmethod
    async def create(
        cls, optimizer_class: Callable[..., object], params_rref: Sequence[RRef[Any]], *args: object, **kwargs: object
    ) -> Self:
        """The same as the constructor, without blocking. If cancelled, what owners have made is dropped."""
        made = cls.__new__(cls)
        made.remote_optimizers = await _make(optimizer_class, params_rref, args, kwargs)
        return made

    def step(self, context_id: int) -> Future[None]:
        """One step on all owners, with the gradients that the context has there.

        Blocks until all have stepped, and returns a completed Future; on the worker's loop it does not block: ``await
        optimizer.step(ctx)``. Any thread.

        A parameter without a gradient in the context is left alone, like one whose ``.grad`` is None, and so is an
        owner that has gradients for none. Nothing is written to ``.grad`` beyond the step. An optimizer that changes
        gradients in place changes those of the context. As with a local optimizer, parameters change in place: a
        backward pass whose graph has saved them raises torch's error, also if another trainer stepped.

        Raised here: RpcUsageError if no such context is open here; NoGradients, a kind of it, if no owner has a
        gradient for any parameter; what the optimizer raises on an owner, with a note that names it; PeerLost at once
        if an owner is lost; RpcTimeout after the worker's ``rpc_timeout``. After an error, and if it is cancelled, some
        owners may have stepped; an owner that waits for its turn then does not.
        """
        node = _node_of(self.remote_optimizers)
        if isinstance(context_id, bool) or not isinstance(context_id, int):
            raise RpcUsageError(f"a context is named by its id, an int, not {context_id!r:.80}")
        node.gradients.get(context_id)

        def finish(stepped: Mapping[str, int]) -> None:
            if not any(stepped.values()):
                raise self._no_gradients(context_id)

        blocking = not node.engine.on_loop
        what = "DistributedOptimizer.step()"
        arguments = (int(context_id),)
        here = partial(_step_here, node, *arguments) if blocking else None
        done = _on_owners(node, self.remote_optimizers, "step", lambda _: arguments, finish, what, here)
        if blocking:
            done.wait()
        return done

    def backward_and_step(self, context_id: int, roots: Sequence[Tensor]) -> Future[None]:
        """A backward pass from `roots`, and a step on each owner as soon as its part of the pass is done.

        The same as ``autograd.backward(context_id, roots)`` and then ``step(context_id)``, with one round trip less:
        the request to step travels with the plan of the pass. Blocks until all have stepped, and returns a completed
        Future; on the worker's loop it does not block: ``await optimizer.backward_and_step(ctx, [loss])``. Any thread.

        No code can look at the gradients or clip them between the two. When this raises or is cancelled, owners whose
        part of the pass was done have stepped, and others have not; an owner that waits for its turn then does not
        step. An owner does not step if this pass gives no gradient to its parameters, even if they have gradients of an
        earlier pass. For errors see `aiorpc.autograd.backward` and `step`; a note names the owner.
        """
        node = _node_of(self.remote_optimizers)
        there: dict[int, bytes] = {}
        here: LocalOptimizer | None = None
        for rref in self.remote_optimizers:
            rref._check()  # a lost owner: before anything is computed
            if rref.is_owner():
                here = rref.local_value()
            else:
                there[rref._owner] = pack_reference(rref._rref)
        one = make_pass(context_id, roots, False, node, Last(here, there, partial(self._no_gradients, context_id)))
        if node.engine.on_loop:
            one.done._site = call_site(outside(__name__))
            node.engine.pool.submit(one.start)
        else:
            one.drive()
        return one.done

    def _no_gradients(self, context_id: int) -> NoGradients:
        return NoGradients(
            f"no parameter of this optimizer has a gradient in autograd context {int(context_id)}, on any of "
            f"its owners ({self._owners()}): was backward() run in this context, and does its loss depend "
            "on these parameters?"
        )

    def state_dict(self) -> dict[str, State]:
        """Each owner's ``state_dict()``, by the owner's name; tensors are copies, in the host's memory. Blocks.

        No step of these parameters is under way while an owner's is copied; owners are not looked at in the same
        moment. Raises PeerLost and RpcTimeout; WouldBlockLoop on the worker's loop, where `state_dict_async` serves.
        """
        self._refuse_on_loop("optimizer.state_dict()", "await optimizer.state_dict_async()")
        return self.state_dict_async().wait()

    def state_dict_async(self) -> Future[dict[str, State]]:
        """The same as a Future, to be awaited or waited for. Any thread."""
        node = _node_of(self.remote_optimizers)
        return _on_owners(node, self.remote_optimizers, "state_dict", lambda _: (), dict, "state_dict()")

    def load_state_dict(self, state_dict: Mapping[str, State]) -> None:
        """Give each owner's optimizer the state of its name, as `state_dict` made it; tensors go to their devices.

        Blocks. Raises RpcUsageError, and nothing was loaded then, if the names are not those of the owners; what
        ``load_state_dict`` raises on an owner, with a note that names it, and others may have loaded theirs;
        WouldBlockLoop on the worker's loop, where `load_state_dict_async` serves.
        """
        self._refuse_on_loop("optimizer.load_state_dict()", "await optimizer.load_state_dict_async(...)")
        self.load_state_dict_async(state_dict).wait()

    def load_state_dict_async(self, state_dict: Mapping[str, State]) -> Future[None]:
        """The same as a Future, to be awaited or waited for. Any thread."""
        owners = [rref.owner_name() for rref in self.remote_optimizers]
        if not isinstance(state_dict, Mapping) or set(state_dict) != set(owners):
            got = ", ".join(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
            raise RpcUsageError(f"a state for each owner is needed, by name: {', '.join(owners)}; got {got or 'none'}")
        node = _node_of(self.remote_optimizers)
        return _on_owners(
            node,
            self.remote_optimizers,
            "load_state_dict",
            lambda name: (state_dict[name],),
            lambda _: None,
            "load_state_dict()",
        )

    def _refuse_on_loop(self, verb: str, awaitable: str) -> None:
        _node_of(self.remote_optimizers).engine.refuse_on_loop(verb, awaitable)

    def _owners(self) -> str:
        return ", ".join(rref.owner_name() for rref in self.remote_optimizers)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {self._owners()}>"


# --- where the optimizer is used --------------------------------------------------------------------------------------


def _node_of(rrefs: Sequence[RRef[object]]) -> Node:
    node: Node = node_of(rrefs[0])
    node.engine.lifetime.check_open()
    return node


def _make(
    optimizer_class: object,
    params_rref: Sequence[RRef[object]],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> Future[list[RRef[object]]]:
    """RRefs of new optimizers, one on each owner."""
    if not callable(optimizer_class):
        kind = type(optimizer_class).__qualname__
        raise RpcUsageError(
            f"optimizer_class is the class, of which each owner makes its own, and not an object of {kind}: pass the "
            "class and its arguments by themselves, DistributedOptimizer(Class, params_rref, lr=...)"
        )
    node = registry.get()
    node.engine.lifetime.check_open()
    by_owner: dict[int, list[RRef[object]]] = {}
    for rref in _checked(params_rref):
        rref._check()
        by_owner.setdefault(rref._owner, []).append(rref)
    starts: dict[str, Callable[[], Future[Any]]] = {}
    for owner, rrefs in by_owner.items():
        call, given = node.peers.by_id(owner).call, (optimizer_class, rrefs, args, kwargs)
        starts[node.peers.describe(owner)] = partial(call, new_optimizer, given, None, node.engine.default_timeout)
    return _Gathered(node, "making a DistributedOptimizer", lambda made: list(made.values()), starts)


def _checked(params_rref: Sequence[RRef[object]]) -> list[RRef[object]]:
    if isinstance(params_rref, RRef | Tensor) or not isinstance(params_rref, Iterable):
        raise RpcUsageError(f"params_rref is a list of RRefs of parameters, not one {type(params_rref).__name__}")
    rrefs = list(params_rref)
    if not rrefs:
        raise RpcUsageError("an optimizer got an empty parameter list: params_rref has no RRefs")
    for place, rref in enumerate(rrefs):
        if not isinstance(rref, RRef):
            raise RpcUsageError(
                f"params_rref[{place}] is no RRef but a {type(rref).__name__}; for a parameter of this worker use "
                "RRef(parameter), for those of a RemoteModule its remote_parameters()"
            )
    return rrefs


def _on_owners(
    node: Node,
    rrefs: Sequence[RRef[object]],
    method: str,
    arguments: Callable[[str], tuple[object, ...]],
    finish: Callable[[dict[str, Any]], T],
    what: str,
    here: Callable[[Any], Future[Any]] | None = None,
) -> Future[T]:
    """Call a method of all local optimizers at once. arguments: for an owner's name; finish: of results, by it.

    here: does the same with that of this worker, in this thread, while the others are at it; None: a call like others.
    """
    for rref in rrefs:
        rref._check()  # a lost owner: before any other has been told
    starts: dict[str, Callable[[], Future[Any]]] = {}
    own = None
    for rref in rrefs:
        if here is not None and rref.is_owner():
            own = rref
        else:
            name = rref.owner_name()
            starts[name] = partial(rref._call_method, method, arguments(name), node.engine.default_timeout)
    if here is not None and own is not None:
        starts[node.engine.name] = partial(here, own.local_value())
    return _Gathered(node, what, finish, starts)


def _step_here(node: Node, context_id: int, optimizer: LocalOptimizer) -> Future[int]:
    """What a call to ourselves would give; done when it returns."""
    done: Future[int] = Future()
    limit = node.engine.default_timeout or None
    try:
        stepped = optimizer.step_on(node, context_id, limit)
    except Exception as error:
        done._settle(None, error)
    else:
        done._settle(stepped)
    return done


class _Gathered(Future[T]):
    """The Future of the results of one call to each of several workers; fails with the first error, noted with the
    worker.

    Making it makes the calls, and cancelling it cancels them.
    """

    def __init__(
        self,
        node: Node,
        what: str,
        finish: Callable[[dict[str, Any]], T],
        starts: Mapping[str, Callable[[], Future[Any]]],
    ) -> None:
        """finish: makes the value from the results by worker; quick, because the thread that reads the last answer
        calls it. starts: by worker, make the calls. If one raises, the calls before it are cancelled.
        """
        super().__init__()
        self._subject, engine = what, node.engine
        self._loop, self._home_thread, self._executor = engine.loop, engine.thread, engine.pool
        self._site = call_site(outside(__name__))
        self._finish = finish
        self._calls: dict[str, Future[Any]] = {}
        for name, start in starts.items():
            try:
                with on_error(self._on_cancel):
                    self._calls[name] = start()
            except Exception as error:
                foreign.add_note(error, self._where(name))
                raise
        self._left = dict.fromkeys(self._calls)  # not answered yet; `pop` is atomic
        self._sources = [*self._calls.values()]
        for name, call in self._calls.items():
            call._when_settled(partial(self._answered, name))

    def _answered(self, name: str, call: Future[object]) -> None:
        error = call.exception()
        if error is not None:
            foreign.add_note(error, self._where(name))
            self._settle(None, error)
            return
        self._left.pop(name, None)
        if self._left:
            return
        try:
            value = self._finish({name: call._value for name, call in self._calls.items()})
        except RpcError as wrong:
            self._settle(None, wrong)
        else:
            self._settle(value)

    def _where(self, name: str) -> str:
        return f"{self._subject}, on worker {name!r}"

    def _on_cancel(self) -> None:
        for call in self._calls.values():
            call.cancel()


# --- on an owner ------------------------------------------------------------------------------------------------------


class _Turns:
    """Turns at parameters. A claim waits for all earlier claims that share a parameter, so there is no deadlock."""

    def __init__(self) -> None:
        self._changed = threading.Condition(Lock())
        self._claims: dict[object, frozenset[int]] = {}  # the ids of parameters, in the order of the claims

    @contextlib.contextmanager
    def claim(
        self, parameters: Sequence[Tensor], seconds: float | None = None, part: Part | None = None
    ) -> Iterator[None]:
        """Within it no other claim has any of the parameters. seconds: the longest wait, None for no limit.

        Entering it raises RpcTimeout after that, and RpcCancelled if the handler's caller gave up meanwhile, or if
        `part`, of a backward pass, has ended.
        """
        claim = object()
        with self._changed:
            self._claims[claim] = frozenset(map(id, parameters))
            free = self._is_next(claim)
        try:
            if not free:
                self._wait(claim, seconds)
            if part is not None and part.over:
                raise RpcCancelled("the backward pass that was to end with a step has failed, or was cancelled")
            if current_call.get() is not None:
                check_cancelled()
            yield
        finally:
            with self._changed:
                del self._claims[claim]
                self._changed.notify_all()

    def _wait(self, claim: object, seconds: float | None) -> None:
        observer = block_observer.get()  # the pool makes up for a thread that only waits
        if observer is not None:
            observer.enter_blocked()
        try:
            with self._changed:
                free = self._changed.wait_for(partial(self._is_next, claim), seconds)
        finally:
            if observer is not None:
                observer.exit_blocked()
        if not free:
            raise RpcTimeout(
                f"DistributedOptimizer.step() waited {seconds:g} s for other steps of the same parameters; "
                "it did not step"
            )

    def _is_next(self, claim: object) -> bool:
        own = self._claims[claim]
        earlier = itertools.takewhile(lambda each: each is not claim, self._claims)
        return all(own.isdisjoint(self._claims[each]) for each in earlier)


# Of the process: several workers in it may share parameters.
_turns = _Turns()


class LocalOptimizer(Closing):
    """An owner's part: an optimizer of those parameters that live here. Its methods are handlers, and may block.

    optim: the optimizer itself, by torch's name for it: schedulers of learning rates take it.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., object],
        parameters: Sequence[Tensor],
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> None:
        self._parameters = list(parameters)
        self.optim: Any = optimizer_class(self._parameters, *args, **kwargs)

    def step(self, context_id: int) -> int:
        """Handler: step with the gradients of a context.

        Returns the number of gradients. Raises RpcUsageError if the caller takes no part in the context.
        """
        node, call = serving()
        context, caller = node.gradients.find(context_id), call.caller_id
        if context is not None and caller != node.engine.id and not context.takes_part(caller):
            raise node.gradients.not_here(context_id)
        return self.step_on(node, context_id)

    def step_on(self, node: Node, context_id: int, seconds: float | None = None, part: Part | None = None) -> int:
        """The same, on that worker. seconds, part: as of `_Turns.claim`."""
        context = node.gradients.find(context_id)
        own = [] if context is None else context.gradients_of(self._parameters)
        count = len(own) - sum(map(operator.is_, own, itertools.repeat(None)))  # `own.count` would compare in torch
        if count:
            with _turns.claim(self._parameters, seconds, part), _as_gradients(self._parameters, own):
                self.optim.step()
                self._finish(node)
        return count

    def close_part(self, node: Node, context_id: int, part: Part, seconds: float | None) -> bool:
        """Step at the end of a part of a backward pass that has reached a parameter. See `Closing`."""
        if part.reached.isdisjoint(map(id, self._parameters)):
            return False
        try:
            return self.step_on(node, context_id, seconds, part) > 0
        except Exception as error:
            foreign.add_note(error, f"DistributedOptimizer.backward_and_step(), on worker {node.engine.name!r}")
            raise

    def _finish(self, node: Node) -> None:
        """Wait for the devices: other streams use the parameters next, and do not wait for this thread's."""
        driver = node.accelerators.accelerator
        if driver is None:
            return
        for index in {parameter.get_device() for parameter in self._parameters} - {-1}:
            driver.synchronize(driver.mark(driver.current(index)))

    def state_dict(self) -> State:
        """The optimizer's, with tensors copied to the host's memory."""
        with _turns.claim(self._parameters):
            state: State = _copied(self.optim.state_dict())
        return state

    def load_state_dict(self, state: State) -> None:
        """The same in reverse. The optimizer keeps tensors of its own."""
        own = _copied(state)
        with _turns.claim(self._parameters):
            self.optim.load_state_dict(own)
            self._finish(serving()[0])


def new_optimizer(
    optimizer_class: Callable[..., object],
    params_rref: Sequence[RRef[Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, object],
) -> RRef[LocalOptimizer]:
    """Handler: an optimizer of these parameters of this worker. NotAllowed if the caller may not make one."""
    rights = permits()
    if rights is not None:
        rights.check_callable(optimizer_class)
    return RRef(LocalOptimizer(optimizer_class, [rref.local_value() for rref in params_rref], args, kwargs))


@contextlib.contextmanager
def _as_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Iterator[None]:
    """Within it these are the parameters' ``.grad``."""
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            try:
                parameter.grad = gradient
            except RuntimeError:  # torch refuses it if the parameter has changed its type or device since
                if gradient is None:
                    raise
                parameter.grad = gradient.to(parameter)
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def _copied(value: object) -> Any:
    """A nest of dicts, lists and tuples with its tensors copied to the host's memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(_copied(each) for each in value)
    return value
