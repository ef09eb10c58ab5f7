"""Debian's Prometheus scrapes four processes under load, and answers the queries of the Grafana board."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aiorpc as rpc
from aiorpc import RpcBackendOptions
from aiorpc.observability.serving import MOST_READERS
from aiorpc.testing import ProcessCluster, process_cluster
from tests.observability.board import queries
from tests.pages import DOCS
from tests.ports import free_port
from tests.runtime.waiting import wait_until

pytestmark = [pytest.mark.prometheus, pytest.mark.slow]

#: Queries whose metrics no worker has here: there is no device.
WITHOUT_DATA = {"aiorpc_device_allocated_bytes", "aiorpc_device_reserved_bytes", "aiorpc_device_buffer_bytes"}
NAMES = ("test", "worker0", "worker1", "worker2")
TASKS: set[asyncio.Task[None]] = set()


def alarms() -> list[str]:
    """The expressions of the guide."""
    text = (DOCS / "howto" / "metrics.md").read_text(encoding="utf-8").partition("## Alarms")[2].partition("\n## ")[0]
    found = re.findall(r"^\| .+ \| `(.+)` \|$", text, re.MULTILINE)
    assert len(found) >= 6
    return found


def own_address() -> str:
    return rpc.current().metrics_address or ""


def fail() -> None:
    raise ValueError


def numbers() -> Iterator[int]:
    yield from range(1000)


async def serve_queue(maxsize: int) -> None:
    """Make this worker the owner of a queue, and the publisher of a value; both go on."""
    queue: rpc.Queue[int] = rpc.Queue("samples", maxsize=maxsize)

    async def publish() -> None:
        for number in range(1_000_000):
            await rpc.publish("policy", torch.full((3,), float(number)))
            await asyncio.sleep(0.2)
            assert queue.name

    _begin(publish())


async def load(others: list[str], owner: str) -> None:
    """Begin to make calls of all kinds to the others, and to use the queue and the value of the owner."""

    async def calls() -> None:
        large = torch.zeros(250_000)
        while True:
            for other in others:
                await rpc.call(other, torch.numel, large)
                with contextlib.suppress(ValueError):
                    await rpc.call(other, fail)
                reference = rpc.remote(other, torch.ones, 3)
                await reference
                await asyncio.gather(*(rpc.call(other, abs, -number) for number in range(20)))
                await asyncio.sleep(0.01)

    async def stream() -> None:
        async for _ in rpc.stream(others[0], numbers):
            await asyncio.sleep(0.05)

    async def puts() -> None:
        queue = rpc.queue("samples", owner=owner)
        while True:
            await queue.put(1)

    async def gets() -> None:
        queue = rpc.queue("samples", owner=owner)
        while True:
            await queue.get()
            await asyncio.sleep(0.05)

    async def reads() -> None:
        async for _ in rpc.subscribe("policy"):
            await asyncio.sleep(0.3)

    for each in (calls(), stream(), puts(), gets(), reads()):
        _begin(each)


def _begin(coroutine: Any) -> None:
    task = asyncio.get_running_loop().create_task(coroutine)
    TASKS.add(task)


def failures() -> list[str]:
    """What has gone wrong in the load of this process."""
    return [repr(task.exception()) for task in TASKS if task.done() and not task.cancelled()]


async def end_load() -> None:
    for task in TASKS:
        task.cancel()
    await asyncio.gather(*TASKS, return_exceptions=True)
    TASKS.clear()


class Prometheus:
    """A server of Prometheus, with its data in a folder, that scrapes twice a second. From one thread."""

    def __init__(self, folder: Path, addresses: list[str]) -> None:
        binary = shutil.which("prometheus")
        assert binary, "there is no Prometheus: run `make testmetrics` as root, or apt-get install prometheus"
        (folder / "prometheus.yml").write_text(
            "global: {scrape_interval: 500ms, scrape_timeout: 500ms}\n"
            "scrape_configs:\n"
            f"  - {{job_name: aiorpc, static_configs: [{{targets: {json.dumps(addresses)}}}]}}\n"
        )
        self.address = f"127.0.0.1:{free_port()}"
        self._log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [
                binary,
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address={self.address}",
            ],
            stderr=self._log,
        )

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its HTTP API. Raises OSError if there is none."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            said = json.load(answer)
        assert said["status"] == "success", said
        return said["data"]

    def query(self, text: str) -> list[dict[str, Any]]:
        """The series that a query gives now."""
        found: list[dict[str, Any]] = self.get("query", query=text)["result"]
        return found

    def up(self) -> int:
        """How many targets it has scraped with success at its last try."""
        try:
            return sum(float(each["value"][1]) == 1 for each in self.query("up"))
        except OSError:
            assert self.process.poll() is None, self.said()
            return 0

    def said(self) -> str:
        """Its log."""
        self._log.seek(0)
        return self._log.read()

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it, and wait until it has ended."""
        self.process.send_signal(number)
        self.process.wait(60)
        self._log.close()


@contextlib.contextmanager
def loaded_group() -> Iterator[tuple[ProcessCluster, list[str]]]:
    """Four workers under load, each in a process of its own, and where their metrics are."""
    with process_cluster(3, options=RpcBackendOptions(metrics="127.0.0.1:0")) as group:
        call = group.worker.call
        call("worker0", serve_queue, 5).wait()
        for name in NAMES:
            call(name, load, [other for other in NAMES if other != name], "worker0").wait()
        try:
            yield group, [call(name, own_address).wait() for name in NAMES]
            assert [call(name, failures).wait() for name in NAMES] == [[]] * len(NAMES)
        finally:
            for name in NAMES:
                with contextlib.suppress(rpc.RpcError):
                    call(name, end_load).wait()


@pytest.mark.time_limit(300)
def test_it_answers_the_queries_of_the_board(tmp_path: Path) -> None:
    """Each query has data, but for those of devices; the figures agree with what the workers say of themselves."""
    with loaded_group() as (group, addresses):
        prometheus = Prometheus(tmp_path, addresses)
        try:
            wait_until(lambda: prometheus.up() == 4, 60)
            missing: list[tuple[str, str]] = [("", "")]
            end = time.monotonic() + 60
            while missing and time.monotonic() < end:  # rates need two scrapes
                answered = {query: prometheus.query(query) for _, query in queries()}
                missing = [
                    (title, query)
                    for title, query in queries()
                    if not answered[query] and not any(name in query for name in WITHOUT_DATA)
                ]
                time.sleep(0.5)
            assert missing == []
            for alarm in alarms():
                prometheus.query(alarm)  # raises if it is none
            names = {each["metric"]["worker"] for each in prometheus.query("aiorpc_worker_info")}
            assert names == set(NAMES)
            counted = 'sum(rpc_client_call_duration_seconds_count{rpc_method="builtins/abs", worker="worker1"})'
            (before,) = prometheus.query(counted)
            wait_until(lambda: float(prometheus.query(counted)[0]["value"][1]) > float(before["value"][1]) + 100)
            (made,) = prometheus.query('sum(rpc_client_call_duration_seconds_count{worker="worker1"})')
            assert float(made["value"][1]) <= group.worker.call("worker1", calls_made).wait()
            failing = 'rpc_server_call_duration_seconds_count{error_type="error"}'
            assert {each["metric"]["rpc_method"] for each in prometheus.query(failing)} == {f"{__name__}/fail"}
            assert all(float(each["value"][1]) == 4 for each in prometheus.query("aiorpc_group_workers"))
            assert not prometheus.get("targets")["droppedTargets"]
            assert all(not each["lastError"] for each in prometheus.get("targets")["activeTargets"])
        finally:
            prometheus.end()


def calls_made() -> int:
    return rpc.current().statistics().calls_made


def left_of_scrapes() -> int:
    """Connections to the port of the metrics that this process has open, and threads that answer them."""
    port = int(own_address().rpartition(":")[2])
    found = sum(each.name.endswith("-reader") for each in threading.enumerate())
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{number}").st_mode):
                continue
            with socket.socket(fileno=os.dup(int(number))) as each:
                listens = each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                found += each.family == socket.AF_INET and each.getsockname()[1] == port and not listens
    return found


@pytest.mark.time_limit(300)
def test_one_that_is_stopped_and_killed_disturbs_no_call(tmp_path: Path) -> None:
    """The load goes on without an error, and nothing of the scrapes stays."""
    with loaded_group() as (group, addresses):
        for number in range(3):
            folder = tmp_path / str(number)
            folder.mkdir()
            prometheus = Prometheus(folder, addresses)
            try:
                wait_until(lambda server=prometheus: server.up() == 4, 60)  # type: ignore[misc]
                made = group.worker.call("worker1", calls_made).wait()
                prometheus.process.send_signal(signal.SIGSTOP)
                wait_until(lambda since=made: group.worker.call("worker1", calls_made).wait() > since + 300)  # type: ignore[misc]
                assert all(group.worker.call(name, left_of_scrapes).wait() <= 2 * MOST_READERS for name in NAMES)
            finally:
                prometheus.end(signal.SIGKILL)
        wait_until(lambda: [group.worker.call(name, left_of_scrapes).wait() for name in NAMES] == [0] * len(NAMES))
