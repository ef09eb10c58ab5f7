"""Where a process answers those who look at its workers: a socket in this user's private directory.

Threads of the process answer questions, also while the loops of its workers stand still: one for each question, so that
one that comes or is taken slowly, as by a stopped process, holds up no other. They read and change nothing. Who may
open the directory, this user and root, may look; it could read the memory of the process as well. `reader` is the other
end. The socket is ``look-PID-NAMES-STACKS.sock``, with the numbers of two descriptors of the process, files in memory
that end with it:

- NAMES: the names of the workers, as JSON, for when the process does not answer;
- STACKS: where `faulthandler` writes the stacks of all threads when the process gets `SIGNAL`, also while a thread
  holds the interpreter lock; 0 if the program has taken that signal.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import faulthandler
import fcntl
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

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
from .memo import Memo, memo
from .recorder import record_group
from .report import (
    LONGEST_QUESTION,
    Answer,
    GroupTrace,
    Look,
    LookAround,
    Question,
    RecordGroup,
    Refused,
    Reports,
    Stacks,
    Text,
)
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
#: Seconds of a recording at most, and for it to begin and to be fetched.
MOST_SECONDS, _TO_FETCH = 600.0, 60.0
#: Of these so many may wait for other members.
_MOST_ASKING = 8
_QUESTIONS: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)


class Visibility:
    """Lets one look at a worker from outside; see `node.Attachment` for the methods. The workers of a process share an
    endpoint."""

    def __init__(self) -> None:
        self._node: Node | None = None
        self._endpoint: Endpoint | None = None
        self._stalls: StallWatch | None = None

    def open(self, stop: threading.Event) -> None:
        """There is nothing to look at yet."""

    def attach(self, node: Node) -> None:
        """Answer questions about it from now on."""
        with registry.sharing:
            endpoint = self._endpoint = registry.servers.setdefault(_NAME, Endpoint())
        self._node = node
        endpoint.enter(node)
        if node.engine.options.stall_warning:
            self._stalls = StallWatch(node, node.engine.options.stall_warning)
            self._stalls.start()

    def close(self) -> None:
        """Answer no more."""
        if self._stalls is not None:
            self._stalls.stop()
        node, self._node = self._node, None
        if node is not None and self._endpoint is not None:
            self._endpoint.leave(node)

    def close_in_child(self) -> None:
        """Let go of the descriptors."""
        if self._endpoint is not None:
            self._endpoint.close_in_child()


class Endpoint:
    """The endpoint of this process. Any thread. It is open while the process has workers."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._nodes: list[Node] = []
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._memo: Memo | None = None
        self._names: int = 0
        self._stacks: int = 0
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

    def close_in_child(self) -> None:
        """See `Shared`."""
        if self._socket is not None:
            self._socket.close()
        if self._memo is not None:
            self._memo.close()
        self._close_files()

    # --- opening and closing; under the lock --------------------------------------------------------------------------

    def _open(self) -> None:
        directory = sockets.private_directory()
        for path in directory.glob(f"look-{os.getpid()}-*.sock"):  # of an earlier process with this number
            path.unlink(missing_ok=True)
        try:
            self._memo = memo()
            self._memo.open()
            self._names = os.memfd_create("aiorpc-names")
            if signal.getsignal(SIGNAL) == signal.SIG_DFL:
                self._stacks = os.memfd_create("aiorpc-stacks")
                fcntl.fcntl(self._stacks, fcntl.F_SETFL, os.O_APPEND)  # `outside.dump` empties it
                faulthandler.register(SIGNAL, self._stacks, all_threads=True)
            self._path = directory / f"look-{os.getpid()}-{self._names}-{self._stacks}.sock"
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            # It gets its name only when it listens: see `sockets.listen_unix`.
            unready = self._path.with_suffix(".made")
            self._socket.bind(str(unready))
            with on_error(unready.unlink):
                self._socket.listen(_BACKLOG)
                unready.rename(self._path)
        except OSError:
            self._close()
            raise
        self._thread = daemon(self._serve, self._socket, name="aiorpc-endpoint")
        self._thread.start()

    def _tell_names(self) -> None:
        if self._names:
            data = msgspec.json.encode([each.engine.name for each in self._nodes])
            os.pwrite(self._names, data, 0)
            os.ftruncate(self._names, len(data))

    def _close(self) -> threading.Thread | None:
        """Returns the thread, which ends now, and closes the socket."""
        thread = self._thread
        listening, self._socket = self._socket, None
        if listening is not None and thread is None:
            listening.close()
        elif listening is not None:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._memo is not None:
            self._memo.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self._close_files()
        self._thread, self._path = None, None
        return thread

    def _close_files(self) -> None:
        if self._stacks:
            faulthandler.unregister(SIGNAL)
            os.close(self._stacks)
        if self._names:
            os.close(self._names)
        self._names = self._stacks = 0

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
                        _answer(connection, lambda: self._ask(question, connection))
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

    def _ask(self, question: LookAround | Stacks | RecordGroup, connection: socket.socket) -> Answer:
        node = next((each for each in self._nodes if each.engine.name == question.worker), None)
        if node is None:
            return Refused(f"this process has no worker {question.worker!r}")
        return record(node, question, connection) if isinstance(question, RecordGroup) else ask(node, question)


def record(node: Node, question: RecordGroup, connection: socket.socket) -> Answer:
    """Let a worker record its group, until its time is over or the other end of the connection has closed."""
    if not 0 < question.seconds <= MOST_SECONDS:
        return Refused(f"a recording takes more than 0 and {MOST_SECONDS:g} s at most, not {question.seconds}")
    until = time.monotonic() + question.seconds + _TO_FETCH
    work = record_group(node, question.seconds, profile=question.profile)
    recording = asyncio.run_coroutine_threadsafe(work, node.engine.loop)
    try:
        while not recording.done():
            concurrent.futures.wait((recording,), _PAUSE)
            if _is_closed(connection):
                raise ConnectionResetError("nobody waits for the recording")
            if time.monotonic() > until:
                return Refused(f"worker {question.worker!r} does not come to it: its loop stands still")
        return GroupTrace(recording.result())
    finally:
        recording.cancel()


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        return not connection.recv(1, socket.MSG_PEEK)
    return False


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
