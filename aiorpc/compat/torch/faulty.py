"""torch's agent that injects faults, over aiorpc's own faults: backend ``FAULTY_TENSORPIPE`` and its options.

Importing ``torch.distributed.rpc._testing`` registers the backend. Types of messages are named as torch names them:

    PYTHON_CALL, SCRIPT_CALL a call; SCRIPT for operators of torch and script functions PYTHON_REMOTE_CALL,
    SCRIPT_REMOTE_CALL a call that creates a reference's value PYTHON_RREF_FETCH_CALL, SCRIPT_... the value of a
    reference is asked for; SCRIPT if an operator made it FORWARD_AUTOGRAD_REQ any of these within an autograd context
    BACKWARD_AUTOGRAD_REQ a step of a backward pass CLEANUP_AUTOGRAD_CONTEXT_REQ an autograd context has ended
    RREF_FORK_REQUEST, RREF_CHILD_ACCEPT, RREF_USER_DELETE counting of references

A call of a failing type raises at its caller. torch sends the last four again until they arrive, after growing pauses.
aiorpc's connections lose nothing, so it sends nothing twice: such a message is delayed by the pauses of
`num_fail_sends` attempts.
"""

from __future__ import annotations

from typing import Any

import torch

from ...errors import RpcError
from ...testing.faults import Faults
from ...testing.passing import MessageKind, SentMessage
from . import script
from .rpc import backend_registry
from .rpc.agent import TensorPipeAgent
from .rpc.options import TensorPipeRpcBackendOptions

__all__ = ["FaultyTensorPipeAgent", "FaultyTensorPipeRpcBackendOptions", "register"]

BACKEND = "FAULTY_TENSORPIPE"
_CALLS = {MessageKind.CALL: "CALL", MessageKind.REMOTE: "REMOTE_CALL", MessageKind.FETCH: "RREF_FETCH_CALL"}
_COUNTING = {"ADD": "RREF_FORK_REQUEST", "CHILD_OK": "RREF_CHILD_ACCEPT", "DEL": "RREF_USER_DELETE"}
_AGAIN = frozenset((*_COUNTING.values(), "CLEANUP_AUTOGRAD_CONTEXT_REQ"))
_TYPES = _AGAIN | {
    *(f"{language}_{call}" for language in ("PYTHON", "SCRIPT") for call in _CALLS.values()),
    "FORWARD_AUTOGRAD_REQ",
    "BACKWARD_AUTOGRAD_REQ",
}
# Seconds before the second attempt, and how much longer each further pause is.
_FIRST_PAUSE, _GROWTH = 0.25, 1.5

# The agent of torch's name is an ordinary worker with rules for faults.
FaultyTensorPipeAgent = TensorPipeAgent


class FaultyTensorPipeRpcBackendOptions(TensorPipeRpcBackendOptions):
    """Options with faults.

    messages_to_fail: types of messages. messages_to_delay: seconds by type. num_fail_sends: how many attempts to send
    such a message fail; 0 for none. ValueError for a type that does not exist.
    """

    messages_to_fail: list[str]
    messages_to_delay: dict[str, float]
    num_fail_sends: int

    def __init__(
        self,
        *,
        messages_to_fail: list[str] | None = None,
        messages_to_delay: dict[str, float] | None = None,
        num_fail_sends: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.messages_to_fail = list(messages_to_fail or ())
        self.messages_to_delay = dict(messages_to_delay or {})
        self.num_fail_sends = num_fail_sends
        unknown = {*self.messages_to_fail, *self.messages_to_delay} - _TYPES
        if unknown:
            raise ValueError(f"No mapping to rpc::MessageType exists for string {', '.join(sorted(unknown))}")


class _Types:
    """Finds torch's types of messages."""

    def __init__(self) -> None:
        self._made_by_operators: set[tuple[int, int]] = set()

    def of(self, message: SentMessage) -> str:
        if message.kind == MessageKind.REFERENCE:
            return _COUNTING.get(message.name, "")
        if message.kind == MessageKind.CONTEXT:
            return "CLEANUP_AUTOGRAD_CONTEXT_REQ"
        if message.kind == MessageKind.GRADIENT:
            return "BACKWARD_AUTOGRAD_REQ"
        if message.kind not in _CALLS:
            return ""
        if message.autograd is not None:
            return "FORWARD_AUTOGRAD_REQ"
        if message.kind == MessageKind.FETCH:
            scripted = message.reference in self._made_by_operators
        else:
            scripted = _is_script(message.function)
            if scripted and message.reference is not None:
                self._made_by_operators.add(message.reference)
        return f"{'SCRIPT' if scripted else 'PYTHON'}_{_CALLS[message.kind]}"


def _is_script(function: object) -> bool:
    if function in (script.run, script.run_async):  # which carry a script function
        return True
    return torch.jit._builtins._find_builtin(function) is not None


def inject(faults: Faults, options: FaultyTensorPipeRpcBackendOptions) -> None:
    """Make the rules of the options."""
    types = _Types()
    # The first rule for each message: it also remembers references that operators have made.
    kinds = [*_CALLS, MessageKind.REFERENCE, MessageKind.CONTEXT, MessageKind.GRADIENT]
    failing = frozenset(options.messages_to_fail if options.num_fail_sends > 0 else ())

    def fails(message: SentMessage) -> bool:
        kind = types.of(message)
        return kind in failing and kind not in _AGAIN

    faults.fail(
        *(kind for kind in kinds if kind != MessageKind.REFERENCE),
        when=fails,
        error=RpcError("it was made to fail (FaultyTensorPipeRpcBackendOptions); if an RRef: RRef creation failed"),
    )
    late = sum(_FIRST_PAUSE * _GROWTH**attempt for attempt in range(options.num_fail_sends))
    faults.delay(late, *kinds, when=lambda message: types.of(message) in failing & _AGAIN)
    for name, seconds in options.messages_to_delay.items():
        faults.delay(seconds, *kinds, when=lambda message, name=name: types.of(message) == name)  # type: ignore[misc]  # mypy cannot infer a lambda with a default


def make_options(rpc_timeout: float, init_method: str, **options: Any) -> FaultyTensorPipeRpcBackendOptions:
    """Options of a worker with faults; registered with the backend."""
    return FaultyTensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **options)


def start_worker(store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any) -> TensorPipeAgent:
    """Start this process's worker, with its faults; registered with the backend."""
    if not isinstance(rpc_backend_options, FaultyTensorPipeRpcBackendOptions):
        raise TypeError(f"`rpc_backend_options` must be a `FaultyTensorPipeRpcBackendOptions`. {rpc_backend_options}")
    agent = backend_registry.start_worker(store, name, rank, world_size, rpc_backend_options)
    inject(Faults(agent.worker).__enter__(), rpc_backend_options)  # for as long as the worker lives
    return agent


def register() -> None:
    """Add the backend, if it is not there."""
    if not backend_registry.backend_registered(BACKEND):
        backend_registry.register_backend(BACKEND, make_options, start_worker)
