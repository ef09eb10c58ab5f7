"""Spans of three processes, as a receiver of OTLP gets them from OpenTelemetry's own exporter."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.observability.traced_program import NAMES

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT = 90.0  # seconds for three processes to start, call each other and end
PROGRAM = "__main__"


class Received(NamedTuple):
    """A span as it came. service: of its resource. worker: of its scope."""

    service: str
    worker: str
    span: Any  # of the protocol buffer

    @property
    def attributes(self) -> dict[str, Any]:
        return {each.key: _value(each) for each in self.span.attributes}


def _value(pair: Any) -> Any:
    return getattr(pair.value, pair.value.WhichOneof("value"))


class Receiver(ThreadingHTTPServer):
    """Takes what exporters send."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Received] = []
        self.paths: set[str] = set()

    def take(self, body: bytes) -> None:
        """One request of an exporter."""
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            named = {each.key: _value(each) for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                worker = {each.key: _value(each) for each in scope.scope.attributes}.get("aiorpc.worker", "")
                self.spans += [Received(named["service.name"], worker, span) for span in scope.spans]


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Receiver)
        self.server.paths.add(self.path)
        self.server.take(self.rfile.read(int(self.headers["Content-Length"])))
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Not to the test's output."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """On a port of its own."""
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
def test_a_receiver_gets_the_spans_of_all_processes(receiver: Receiver, tmp_path: Path) -> None:
    """As one trace over three workers, with kinds, parents, links, errors and the names of services and workers."""
    environment = {
        **os.environ,
        "AIORPC_TRACES": "1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{receiver.server_address[1]}",
    }
    program = [sys.executable, "-m", "tests.observability.traced_program"]
    processes = [
        subprocess.Popen([*program, str(rank), str(tmp_path / "store")], cwd=ROOT, env=environment)
        for rank in range(len(NAMES))
    ]
    try:
        assert [process.wait(LIMIT) for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert receiver.paths == {"/v1/traces"}

    def one(name: str, kind: int, worker: str) -> Any:
        wanted = name, kind, worker
        found = [each for each in receiver.spans if (each.span.name, each.span.kind, each.worker) == wanted]
        assert len(found) == 1, (name, worker, [(each.span.name, each.worker) for each in receiver.spans])
        assert found[0].service == f"worker-{worker or 'a'}"
        return found[0].span

    step = one("step", Span.SPAN_KIND_INTERNAL, "")
    chain = [
        step,
        one(f"{PROGRAM}/work", Span.SPAN_KIND_CLIENT, "a"),
        one(f"{PROGRAM}/work", Span.SPAN_KIND_SERVER, "b"),
        one(f"{PROGRAM}/double", Span.SPAN_KIND_CLIENT, "b"),
    ]
    for parent, child in itertools.pairwise(chain):
        assert (child.trace_id, child.parent_span_id) == (step.trace_id, parent.span_id)
        assert parent.start_time_unix_nano <= child.start_time_unix_nano <= child.end_time_unix_nano
    doubled = [each.span for each in receiver.spans if each.span.name == f"{PROGRAM}/double"]
    group = one(f"{PROGRAM}/double", Span.SPAN_KIND_CLIENT, "a")
    parents = [span.parent_span_id for span in doubled if span.kind == Span.SPAN_KIND_SERVER]
    assert sorted(parents) == sorted([chain[-1].span_id, group.span_id, group.span_id])
    assert not group.parent_span_id
    stream = one(f"{PROGRAM}/count", Span.SPAN_KIND_SERVER, "b")
    assert stream.parent_span_id == one(f"{PROGRAM}/count", Span.SPAN_KIND_CLIENT, "a").span_id
    for kind, worker in ((Span.SPAN_KIND_CLIENT, "a"), (Span.SPAN_KIND_SERVER, "c")):
        failed = one(f"{PROGRAM}/fail", kind, worker)
        assert failed.status.code == Status.STATUS_CODE_ERROR
        assert Received("", "", failed).attributes["error.type"] == "ValueError"
        assert [event.name for event in failed.events] == ["exception"]
    put = one("put samples", Span.SPAN_KIND_PRODUCER, "b")
    (link,) = one("get samples", Span.SPAN_KIND_CONSUMER, "a").links
    assert (link.trace_id, link.span_id) == (put.trace_id, put.span_id)
    assert put.parent_span_id == one(f"{PROGRAM}/put", Span.SPAN_KIND_SERVER, "b").span_id
    systems = {each.attributes.get("rpc.system.name") for each in receiver.spans if each.span.kind in (2, 3)}
    assert systems == {"aiorpc"}
