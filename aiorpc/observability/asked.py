"""Asking other members of a group for their reports and stacks, and answering them.

In a group with rights (the option ``allow``) a member may ask whose role may call `report` under its name,
``aiorpc.observability.asked:report``, and `stacks` under its.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from .. import foreign
from ..errors import RpcError, RpcTimeout
from ..futures import Future
from ..runtime.calls.functions import inline, system
from ..runtime.node import Node, registry, serving
from .making import report_of
from .report import Answer, LookAround, Refused, Reports, Stacks, Text, Unseen, WorkerReport
from .stacks import all_stacks


@system
@inline
def report(tally: bool = False, log: bool = False) -> bytes:
    """Handler: this worker's report, as MessagePack. tally, log: as of `Look`."""
    node, call = serving()
    if call.permits is not None:
        call.permits.check_callable(report)
    return msgspec.msgpack.encode(report_of(node, tally=tally, log=log))


@system
@inline
def stacks() -> str:
    """Handler: the stacks of all threads and tasks of this worker's process."""
    _, call = serving()
    if call.permits is not None:
        call.permits.check_callable(stacks)
    return all_stacks(registry.nodes())


def ask(node: Node, question: LookAround | Stacks) -> Answer:
    """Let a worker ask other members. Blocks for at most `question.patience` seconds. In a thread without a loop."""
    if isinstance(question, Stacks):
        try:
            return Text(str(_call(node, question.member, stacks, question.patience).wait(question.patience)))
        except RpcError as error:
            return Refused(foreign.said(error))
    until = time.monotonic() + question.patience
    answer = Reports()
    wanted = question.tally, question.log
    calls = {name: _call(node, name, report, question.patience, wanted) for name in question.members}
    for name, call in calls.items():
        try:
            data = call.wait(max(0.0, until - time.monotonic()))
            answer.reports.append(msgspec.msgpack.decode(data, type=WorkerReport))
        except (RpcError, msgspec.DecodeError, TypeError) as error:
            how = "unanswered" if isinstance(error, RpcTimeout) else ""
            answer.unseen.append(Unseen(name, why=foreign.said(error), how=how))
    return answer


def _call(
    node: Node, name: str, function: Callable[..., object], timeout: float, args: tuple[bool, ...] = ()
) -> Future[bytes]:
    call: Future[bytes]
    try:
        call = node.peers.find(name).call(function, args, None, timeout, system=True)
    except RpcError as error:
        call = Future()
        call._settle(None, error)
    call._mark_seen()
    return call
