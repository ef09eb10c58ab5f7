"""Where a process answers those who look at its workers: a socket in this user's private directory.

Threads of the process answer questions, also while the loops of its workers stand still: one for each question, so that
one that comes or is taken slowly, as by a stopped process, holds up no other. They read and change nothing. Who may
open the directory, this user and root, may look; it could read the memory of the process as well. `reader` is the other
end. Beside the socket ``look-PID.sock`` lie

- ``look-PID.json``: the names of the workers, for when the process does not answer;
- ``look-PID.stacks``: where `faulthandler` writes the stacks of all threads when the process gets `SIGNAL`, also while
  a thread holds the interpreter lock. The signal is taken only if the program has not.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TextIO

import msgspec

from .. import foreign
from ..errors import RpcError, WorkerClosed
from ..locks import Lock
from ..logs import logger
from ..runtime.node import Node, registry
from ..threads import daemon
from ..transport import sockets
from ..undoing import on_error
from .asked import ask
from .making import report_of
from .memo import memo
from .report import LONGEST_QUESTION, Answer, Look, LookAround, Question, Refused, Reports, Stacks, Text
from .stacks import all_stacks
from .stalls import StallWatch

_NAME = "endpoint"
#: Of the real-time signals, which no system service and few programs use, the last but one.
SIGNAL = int(signal.SIGRTMAX) - 1
#: Seconds for a question to come, and for its answer to be taken.
_PATIENCE = 2.0
#: So many questions are answered at a time; further ones wait.
_MOST_AT_ONCE = 32
_BACKLOG = 64
_PAUSE = 0.1
#: Of these so many may wait for other members.
_MOST_ASKING = 8
_QUESTIONS: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)


def accompany(node: Node, stack: AsyncExitStack) -> None:
    """Answer questions about that worker until the stack is closed. On its loop."""
    endpoint = registry.shared.setdefault(_NAME, Endpoint())
    assert isinstance(endpoint, Endpoint), "nothing else has that name"
    endpoint.enter(node)
    stack.callback(endpoint.leave, node)
    if node.engine.options.stall_warning:
        watch = StallWatch(node, node.engine.options.stall_warning)
        watch.start()
        stack.callback(watch.stop)


class Endpoint:
    """The endpoint of this process. Any thread. It is open while the process has workers."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._nodes: list[Node] = []
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._files: list[Path] = []
        self._stacks: TextIO | None = None
        self._answering = threading.Semaphore(_MOST_AT_ONCE)
        self._asking = threading.Semaphore(_MOST_ASKING)

    def enter(self, node: Node) -> None:
        """A worker of this process has joined. A directory that cannot be written is logged, and ends nothing."""
        with self._lock:
            self._nodes.append(node)
            try:
                if self._socket is None:
                    self._open()
                self._tell_names()
            except OSError as error:
                logger.warning("workers of this process cannot be looked at from outside: %s", error)

    def leave(self, node: Node) -> None:
        """That worker is being taken down."""
        with self._lock:
            self._nodes = [each for each in self._nodes if each is not node]
            if self._nodes:
                with contextlib.suppress(OSError):
                    self._tell_names()
                return
            thread = self._close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(2 * _PATIENCE)

    def at_exit(self) -> None:
        """See `Shared`."""
        with self._lock:
            self._close()

    def close_in_child(self) -> None:
        """See `Shared`."""
        if self._socket is not None:
            self._socket.close()
        if self._stacks is not None:
            faulthandler.unregister(SIGNAL)
            self._stacks.close()

    # --- opening and closing; under the lock --------------------------------------------------------------------------

    def _open(self) -> None:
        base = sockets.private_directory() / f"look-{os.getpid()}"
        self._files = [base.with_suffix(end) for end in (".sock", ".json", ".stacks")]
        for path in self._files:  # of an earlier process with this number
            path.unlink(missing_ok=True)
        memo().open()
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # It gets its name only when it listens: see `sockets.listen_unix`.
        unready = base.with_suffix(".made")
        unready.unlink(missing_ok=True)
        with on_error(made.close):
            made.bind(str(unready))
            made.listen(_BACKLOG)
            unready.rename(self._files[0])
        self._socket = made
        if signal.getsignal(SIGNAL) == signal.SIG_DFL:
            self._stacks = open(self._files[2], "a", encoding="utf-8")  # noqa: SIM115  # closed with the endpoint
            faulthandler.register(SIGNAL, self._stacks, all_threads=True)
        self._thread = daemon(self._serve, made, name="aiorpc-endpoint")
        self._thread.start()

    def _tell_names(self) -> None:
        if not self._files:
            return
        names = [{"name": each.engine.name, "init_method": each.worker.init_method} for each in self._nodes]
        new = self._files[1].with_suffix(".new")
        new.write_bytes(msgspec.json.encode(names))
        new.replace(self._files[1])

    def _close(self) -> threading.Thread | None:
        """Returns the thread, which ends now."""
        listening, self._socket = self._socket, None
        if listening is not None:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._stacks is not None:
            faulthandler.unregister(SIGNAL)
            self._stacks.close()
        memo().close()
        for path in self._files:
            path.unlink(missing_ok=True)
        thread = self._thread
        self._stacks, self._thread, self._files = None, None, []
        return thread

    # --- answering; in the thread -------------------------------------------------------------------------------------

    def _serve(self, listening: socket.socket) -> None:
        with listening:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:  # it was shut down, or the process has too many files open
                    if self._socket is not listening:
                        return
                    time.sleep(_PAUSE)
                    continue
                self._answering.acquire()
                try:
                    daemon(self._take, connection, name="aiorpc-endpoint-answers").start()
                except RuntimeError:  # no thread can be started
                    self._answering.release()
                    connection.close()

    def _take(self, connection: socket.socket) -> None:
        """Answer one question."""
        try:
            with connection:
                question = receive_question(connection)
                if isinstance(question, Look):
                    _answer(connection, lambda: _reports(self._nodes, question))
                elif isinstance(question, Stacks) and not question.member:
                    _answer(connection, lambda: Text(all_stacks(self._nodes)))
                elif self._asking.acquire(blocking=False):
                    try:
                        _answer(connection, lambda: self._ask(question))
                    finally:
                        self._asking.release()
                else:
                    _answer(connection, lambda: Refused(f"{_MOST_ASKING} others ask this process; ask again later"))
        except (OSError, ValueError, msgspec.DecodeError):  # who asks has gone, or is none of ours
            pass
        except Exception as error:
            foreign.log_error(logger, 10, error, "a question from outside could not be answered")
        finally:
            self._answering.release()

    def _ask(self, question: LookAround | Stacks) -> Answer:
        node = next((each for each in self._nodes if each.engine.name == question.worker), None)
        if node is None:
            return Refused(f"this process has no worker {question.worker!r}")
        return ask(node, question)


def _reports(nodes: list[Node], question: Look) -> Reports:
    return Reports([report_of(each, tally=question.tally, log=question.log) for each in nodes])


def receive_question(connection: socket.socket) -> Question:
    """Read a question. OSError if it does not come, ValueError if it is none."""
    until = time.monotonic() + _PATIENCE
    size: int = struct.unpack("!I", _receive(connection, 4, until))[0]
    if size > LONGEST_QUESTION:
        raise ValueError(f"a question of {size} bytes")
    return _QUESTIONS.decode(_receive(connection, size, until))


def _receive(connection: socket.socket, size: int, until: float) -> bytes:
    data = b""
    while len(data) < size:
        connection.settimeout(max(0.001, until - time.monotonic()))
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionResetError("the question is not complete")
        data += more
    return data


def _answer(connection: socket.socket, make: Callable[[], Answer]) -> None:
    try:
        answer = make()
    except (RpcError, WorkerClosed) as error:
        answer = Refused(foreign.said(error))
    data = msgspec.msgpack.encode(answer)
    connection.settimeout(_PATIENCE)  # for all of it
    connection.sendall(struct.pack("!I", len(data)) + data)
