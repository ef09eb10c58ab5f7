"""Where the threads, tasks and handlers of this process stand. Any thread."""

from __future__ import annotations

import asyncio
import gc
import itertools
import linecache
import opcode
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from types import AsyncGeneratorType, CodeType, FrameType
from typing import Any

from ..runtime.calls.current import ServedCall
from ..runtime.node import Node
from ..sites import describe_site
from ..threads import current_frames

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LIBRARY = os.path.dirname(threading.__file__)
#: What stands before the lock in a `with` statement.
_BEFORE = re.compile(r"\bwith\s.*$")
_BEGINNING = "Thread._bootstrap_inner"
#: Of one stack so many lines are shown, innermost first.
_FRAMES = 12


def stack_of_thread(thread: int) -> list[str]:
    """The lines at which a thread stands, innermost first, without those inside of aiorpc. Empty if it has ended."""
    return _lines(_frames_of(thread))


def stack_of_task(task: asyncio.Task[Any]) -> list[str]:
    """The same of a task: of its coroutine and of the ones that it awaits."""
    places = list(_awaited(task.get_coro()))
    return _lines(reversed(places))


def stack_of_step(thread: int) -> list[str]:
    """The same of what the loop of a thread runs now, without the frames of the loop."""
    places = itertools.takewhile(lambda place: "/asyncio/" not in place[0].co_filename, _frames_of(thread))
    return _lines(places)


def stack_of_call(call: ServedCall) -> list[str]:
    """The same of the handler of a call. Empty for a handler that neither runs nor awaits, such as one whose result is
    a Future."""
    task, thread, engine = call.task, call.thread, call.node.engine
    if task is not None and asyncio.current_task(engine.loop) is task:  # a coroutine that runs shows no inner ones
        return stack_of_step(engine.thread)
    if task is not None:
        return stack_of_task(task)
    return stack_of_thread(thread) if thread else []


def stands_at_lock(call: ServedCall) -> bool:
    """Whether the handler of a call waits for a lock or a semaphore, of `threading` or of `asyncio`."""
    if call.task is not None:
        places = list(_awaited(call.task.get_coro()))
        return bool(places) and _is_in(places[-1][0], "asyncio", "locks.py") and places[-1][0].co_name == "acquire"
    frame = current_frames().get(call.thread) if call.thread else None
    if frame is None or frame.f_code.co_filename.startswith(_PACKAGE):  # in a wait of aiorpc
        return False
    within = None  # a semaphore waits in a condition, as an event does, which is no lock
    while frame.f_back is not None and _is_in(frame.f_code, "", "threading.py"):
        within, frame = frame.f_code, frame.f_back
    return _takes_lock(frame) if within is None else within.co_name in ("acquire", "__enter__")


def _is_in(code: CodeType, folder: str, name: str) -> bool:
    """Whether that code is in a module of the standard library."""
    return code.co_filename == os.path.join(_LIBRARY, folder, name)


def _takes_lock(frame: FrameType) -> bool:
    """Whether a frame stands at a `with` statement, before its block, or in a call of `acquire`.

    The locks of `threading` are of C and have no frame. The source is needed, but for `with` before Python 3.14.
    """
    code, number = frame.f_code, frame.f_lineno
    if opcode.opname[code.co_code[frame.f_lasti]] == "BEFORE_WITH":
        return True
    start = end = None
    for index, place in enumerate(code.co_positions()):
        if index == frame.f_lasti // 2 and place[0] == place[1] == number:
            start, end = place[2:]
    line = linecache.getline(code.co_filename, number).encode()
    text, before = line[start:end].decode(errors="replace"), line[:start].decode(errors="replace")
    if start is None or end is None:
        return False
    return ".acquire(" in text or (not text.endswith(")") and bool(_BEFORE.search(before)))


def all_stacks(nodes: list[Node]) -> str:
    """The stacks of all threads and tasks of this process, each with the call that it serves and those it waits for."""
    calls = [call for node in nodes for service in list(node.services) for call in list(service.calls.values())]
    of_thread = {call.thread: call for call in calls if call.thread and call.task is None}
    of_task = {call.task: call for call in calls if call.task is not None}
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    made = _made(nodes)

    def lines_of(call: ServedCall | None, places: Iterator[_Place]) -> list[str]:
        waits = [] if call is None else made[call.caller.name, call.call_id]
        return [*waits, *_every_line(places)]

    parts = []
    for ident, frame in current_frames().items():
        if ident != threading.get_ident():
            served = of_thread.get(ident)
            title = f"thread {names.get(ident, '?')} ({ident}){_serving(served)}"
            parts.append(_part(title, lines_of(served, _frames(frame))))
    for loop in {node.engine.loop for node in nodes}:
        for task in _tasks_of(loop):
            served = of_task.get(task)
            title = f"task {task.get_name()}{_serving(served)}"
            parts.append(_part(title, lines_of(served, reversed(list(_awaited(task.get_coro()))))))
    if made[None]:
        parts.append(_part("the program", made[None]))
    return "\n".join(parts)


def _made(nodes: list[Node]) -> defaultdict[tuple[str, int] | None, list[str]]:
    """A line for each call that these workers wait for, by the call whose handler has made it; None: the program."""
    made: defaultdict[tuple[str, int] | None, list[str]] = defaultdict(list)
    for peer in (each for node in nodes for each in node.peers.all()):
        for call in list(peer.pending.calls.values()):
            if not call.system:
                since, site = time.monotonic() - call.started, describe_site(call._site)
                at = f", made at {site}" if site else ""
                made[call.parent].append(f"waits for {call.function} on worker {peer.name!r}, since {since:.1f} s{at}")
    return made


def _serving(call: ServedCall | None) -> str:
    return "" if call is None else f", serves {call.function} for {call.caller.name}"


def _part(title: str, lines: list[str]) -> str:
    return "\n".join((title, *(f"    {line}" for line in lines), ""))


def _tasks_of(loop: asyncio.AbstractEventLoop) -> list[asyncio.Task[Any]]:
    for _ in range(100):
        try:
            return [task for task in asyncio.all_tasks(loop) if not task.done()]
        except RuntimeError:  # another thread has changed the set meanwhile
            continue
    return []


_Place = tuple[CodeType, int]


def _frames_of(thread: int) -> Iterator[_Place]:
    return _frames(current_frames().get(thread))


def _frames(frame: FrameType | None) -> Iterator[_Place]:
    while frame is not None:
        yield frame.f_code, frame.f_lineno
        frame = frame.f_back


def _awaited(coroutine: Any) -> Iterator[_Place]:
    """The frames of a coroutine and of what it awaits, outermost first."""
    while coroutine is not None:
        kind = next((each for each in ("cr", "gi", "ag") if hasattr(coroutine, f"{each}_frame")), None)
        if kind is None:  # a step of an asynchronous generator does not tell of which one
            steps = type(coroutine).__name__ in ("async_generator_asend", "async_generator_athrow")
            of = (each for each in gc.get_referents(coroutine) if isinstance(each, AsyncGeneratorType))
            coroutine = next(of, None) if steps else None
            continue
        frame: FrameType | None = getattr(coroutine, f"{kind}_frame")
        if frame is not None:
            yield frame.f_code, frame.f_lineno
        coroutine = getattr(coroutine, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")


def _lines(places: Iterator[_Place]) -> list[str]:
    return [_line(*each) for each in places if not _is_ours(each[0])][:_FRAMES]


def _is_ours(code: CodeType) -> bool:
    """Whether it is code of aiorpc, or what every thread begins with."""
    return code.co_filename.startswith(_PACKAGE) or (
        _is_in(code, "", "threading.py") and code.co_qualname in ("Thread.run", "Thread._bootstrap", _BEGINNING)
    )


def _every_line(places: Iterator[_Place]) -> list[str]:
    return [_line(*each) for each in places]


def _line(code: CodeType, line: int) -> str:
    return f"{code.co_filename}:{line} in {code.co_qualname}"
