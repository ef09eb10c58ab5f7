"""The HTTP server of metrics: one for each address in a process, for all workers that have it. Imports
`prometheus_client`.

A request is answered in a thread of its own. A reader that stands still or is slow holds up nothing but this thread: it
is cut off if it reads or sends nothing for `PATIENCE`, and beside `MOST_READERS` of them others are turned away.
"""

from __future__ import annotations

import hmac
import os
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ..locks import Lock
from ..logs import logger
from ..runtime.engine.tally import Tally
from ..runtime.node import Node
from ..threads import daemon
from .measures import COUNTER, HISTOGRAM, MEASURES, Scraped

#: Seconds for which a reader may send or take nothing.
PATIENCE = 10.0
MOST_READERS = 8
# Seconds for the threads of readers to end.
_JOIN_SECONDS = 2.0

_Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Workers(Collector):
    """Collects the metrics of the workers of one server. Any thread."""

    def __init__(self) -> None:
        self._lock: Any = Lock()  # held while workers are looked at: one that leaves waits until the look is over
        self._workers: dict[Node, tuple[str, Tally]] = {}

    def add(self, node: Node, tally: Tally) -> None:
        """Collect the metrics of a worker. Workers of the same name, which are in several groups, are numbered."""
        with self._lock:
            names = [name for name, _ in self._workers.values()]
            name, number = node.engine.name, 1
            while name in names:
                number += 1
                name = f"{node.engine.name}:{number}"
            self._workers[node] = name, tally

    def remove(self, node: Node) -> None:
        """A worker leaves. Waits until it is not looked at."""
        with self._lock:
            self._workers.pop(node, None)

    def collect(self) -> Iterator[_Family]:
        """All metrics of all workers."""
        with self._lock:
            now = time.monotonic()
            families = _families([(name, Scraped(node, tally, now)) for node, (name, tally) in self._workers.items()])
        yield from families


def _families(looks: list[tuple[str, Scraped]]) -> list[_Family]:
    families: list[_Family] = []
    for measure in MEASURES:
        labels = ("worker", *measure.labels)
        rows = [(name, row) for name, look in looks for row in measure.read(look)]
        if measure.kind == HISTOGRAM:
            histogram = HistogramMetricFamily(measure.name, measure.meaning, labels=labels)
            for name, (values, buckets, total) in rows:
                histogram.add_metric((name, *values), buckets, total)
            families.append(histogram)
            continue
        kind = CounterMetricFamily if measure.kind == COUNTER else GaugeMetricFamily
        family = kind(measure.name, measure.meaning, labels=labels)
        for name, (values, figure) in rows:
            family.add_metric((name, *values), figure)
        families.append(family)
    return families


class Reader(BaseHTTPRequestHandler):
    """One reader. timeout: seconds for each wait for it."""

    timeout: ClassVar[float | None] = PATIENCE
    server: MetricsServer

    def do_GET(self) -> None:
        """Answer with the metrics, in the form that the reader asks for."""
        token = self.server.token
        said = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if token and not hmac.compare_digest(said, b"Bearer " + token):
            self.send_response(401)
            self.send_header("WWW-Authenticate", "Bearer")
            body = b""
        else:
            encode, kind = choose_encoder(self.headers.get("Accept", ""))
            body = encode(self.server.registry)
            self.send_response(200)
            self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))  # an answer that was cut off is no answer
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""


class MetricsServer(socketserver.TCPServer):
    """Serves the metrics of its workers. Made and closed in any thread.

    collected: its workers. token: what readers have to show; empty for none. users: how many workers use it; under the
    lock of the registry of workers. address: host and port that it listens on.
    """

    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, family: int, address: Any, token: bytes) -> None:
        """address: as `socket.getaddrinfo` gives it. Raises OSError if it cannot listen there, or has no thread."""
        self.address_family = family
        self.token = token
        self.users = 0
        self.collected: Workers = Workers()
        self._readers: dict[threading.Thread, socket.socket] = {}
        self._lock: Any = Lock()
        self._ended = False
        self.registry: CollectorRegistry = CollectorRegistry()
        self.registry.register(self.collected)
        ProcessCollector(registry=self.registry)
        super().__init__(address, Reader)
        host, port = self.server_address[:2]
        self.address: str = f"[{host!s}]:{port}" if family == socket.AF_INET6 else f"{host!s}:{port}"
        self._thread = daemon(self._serve, name=f"aiorpc-metrics-{port}")
        try:
            self._thread.start()
        except RuntimeError as error:
            self.server_close()
            raise OSError(f"no thread can be started: {error}") from error

    def _serve(self) -> None:
        while not self._ended:
            self.handle_request()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, or turn the reader away."""
        thread = daemon(self._answer, request, client_address, name=f"{self._thread.name}-reader")
        with self._lock:
            full = self._ended or len(self._readers) >= MOST_READERS
            if not full:
                self._readers[thread] = request
        try:
            if not full:
                thread.start()
                return
            logger.debug("a reader of metrics was turned away: %d others are being answered", MOST_READERS)
        except RuntimeError as error:
            logger.debug("a reader of metrics was turned away: %s", error)
            self._forget(thread)
        self.shutdown_request(request)

    def _answer(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError as error:  # it has gone, or stands still
            logger.debug("a reader of metrics got no answer: %s", error)
        except Exception:
            logger.exception("the metrics cannot be read")
        finally:
            self.shutdown_request(request)
            self._forget(threading.current_thread())

    def _forget(self, thread: threading.Thread) -> None:
        with self._lock:
            self._readers.pop(thread, None)

    def close(self) -> None:
        """Listen no more, and cut readers off. Call `join` afterwards."""
        self._ended = True
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self.server_close()
        with self._lock:
            for request in self._readers.values():
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Wait until the threads have ended, for a bounded time."""
        for thread in (self._thread, *list(self._readers)):
            thread.join(_JOIN_SECONDS)

    def close_in_child(self) -> None:
        """In a forked child: let go of the descriptors. Takes no lock."""
        for each in (self.socket, *self._readers.values()):
            with suppress(OSError):
                os.close(each.detach())
