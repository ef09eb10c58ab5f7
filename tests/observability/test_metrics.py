"""Metrics as Prometheus reads them: what happened is in them, they are bounded, and reading them disturbs nothing."""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.error
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.distributed import HashStore

import aiorpc as rpc
from aiorpc import RpcBackendOptions, Worker
from aiorpc.observability import serving
from aiorpc.observability.measures import MEASURES
from aiorpc.runtime.engine.tally import BOUNDS, MOST_FUNCTIONS, OTHER
from aiorpc.testing import cluster, process_cluster
from tests.observability.scraping import Scrape, read, scrape
from tests.pages import DOCS
from tests.ports import free_port
from tests.runtime.waiting import LIMIT, until

ANY = RpcBackendOptions(metrics="127.0.0.1:0")
TOKEN = "a token of thirty-two characters"
GATES: dict[str, asyncio.Event] = {}
DOOR = threading.Event()
DURATION = "rpc_{}_call_duration_seconds_{}"


@pytest.fixture(autouse=True)
def shut() -> Iterator[None]:
    """What handlers wait for is new for each test."""
    GATES.clear()
    DOOR.clear()
    yield
    DOOR.set()


@pytest.fixture
async def pair() -> AsyncIterator[list[Worker]]:
    """Two workers of this process that share a server."""
    async with cluster(2, options=ANY) as workers:
        yield workers


def fail() -> None:
    raise ValueError


async def stand(gate: str) -> None:
    await GATES.setdefault(gate, asyncio.Event()).wait()


def count(numbers: int) -> Iterator[int]:
    yield from range(numbers)


def block(seconds: float) -> None:
    threading.Event().wait(seconds)


def wait_at_the_door() -> bool:
    return DOOR.wait(LIMIT)


async def stand_in_a_context(gate: str) -> None:
    async with rpc.autograd.context():
        await stand(gate)


# --- calls ------------------------------------------------------------------------------------------------------------


async def test_calls_are_counted_by_function_and_outcome_at_both_ends(pair: list[Worker]) -> None:
    """Each once, with its duration; the names of functions are those of the conventions."""
    for _ in range(5):
        await pair[0].call("worker1", abs, -3)
    with pytest.raises(ValueError):
        await pair[0].call("worker1", fail)
    with pytest.raises(rpc.RpcTimeout):
        await pair[0].peer("worker1", timeout=0.05).call(stand, "never")
    called = pair[0].call("worker1", stand, "never")
    await until(lambda: pair[1].statistics().calls_running)
    called.cancel()
    here = f"{__name__}/"
    await until(lambda: not pair[1].statistics().calls_running)
    seen = await scrape(pair[0])
    for side, worker in (("client", "worker0"), ("server", "worker1")):
        counted = {
            (each.labels["rpc_method"], each.labels["error_type"]): each.value
            for each in seen.samples
            if each.name == DURATION.format(side, "count") and each.labels["worker"] == worker
        }
        assert counted == {
            ("builtins/abs", ""): 5,
            (f"{here}fail", "error"): 1,
            (f"{here}stand", "timeout"): 1,
            (f"{here}stand", "cancelled"): 1,
        }
        total = DURATION.format(side, "sum")
        assert 0.03 < seen.of(total, rpc_method=f"{here}stand", error_type="timeout", worker=worker) < LIMIT
        assert seen.of(DURATION.format(side, "bucket"), le="+Inf", rpc_method="builtins/abs", worker=worker) == 5
        assert seen.labels(DURATION.format(side, "bucket"), "rpc_system_name") == {"aiorpc"}
    assert len(seen.labels(DURATION.format("client", "bucket"), "le")) == len(BOUNDS) + 1
    assert min(BOUNDS) == 1e-5


async def test_a_duration_is_in_the_buckets_above_it(pair: list[Worker]) -> None:
    """A call of 0.3 s is in those from 0.4 s on, and in none below."""
    await pair[0].call("worker1", block, 0.3)
    seen = await scrape(pair[0])
    labels = {"rpc_method": f"{__name__}/block", "worker": "worker1"}
    buckets = {
        float(each.labels["le"]): each.value
        for each in seen.samples
        if each.name == DURATION.format("server", "bucket") and labels.items() <= each.labels.items()
    }
    total = seen.of(DURATION.format("server", "sum"), **labels)
    assert 0.3 <= total < LIMIT
    assert all(value == (bound >= total) for bound, value in buckets.items())


async def test_calls_of_the_runtime_do_not_count(pair: list[Worker]) -> None:
    """As in `statistics`: what workers say to each other by themselves is no call of the program."""
    await pair[0].wait_for("worker1")
    async with pair[0].subscribe("nothing", timeout=0.1):
        assert DURATION.format("client", "count") not in {each.name for each in (await scrape(pair[0])).samples}


async def test_calls_under_way_and_waiting_are_shown() -> None:
    """At the caller, at the worker that serves them, and those that no thread is there for."""
    options = RpcBackendOptions(metrics="127.0.0.1:0", num_worker_threads=1)
    async with cluster(2, options=options) as (here, there):
        calls = [here.call("worker1", stand, "open") for _ in range(3)]
        at_the_door = [here.call("worker1", wait_at_the_door) for _ in range(4)]
        await until(lambda: there.statistics().calls_running == 7 and there.statistics().jobs_queued == 3)
        seen = await scrape(here)
        assert seen.of("aiorpc_client_active_calls", worker="worker0") == 7
        assert seen.of("aiorpc_server_active_calls", worker="worker1") == 7
        assert seen.of("aiorpc_server_queued_calls", worker="worker1") == 3
        assert seen.of("aiorpc_threads", state="busy", worker="worker1") == 1
        assert seen.of("aiorpc_client_active_calls", worker="worker1") == 0
        GATES["open"].set()
        DOOR.set()
        await asyncio.gather(*calls, *at_the_door)
        seen = await scrape(here)
        assert seen.of("aiorpc_client_active_calls") == seen.of("aiorpc_server_active_calls") == 0


async def test_functions_beyond_the_bound_are_one(pair: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that are called have their names, all others are `_OTHER`, and the sum is right."""
    module = ModuleType("many_functions")
    number = MOST_FUNCTIONS + 100
    exec("".join(f"def f{n}(): return {n}\n" for n in range(number)), module.__dict__)
    monkeypatch.setitem(sys.modules, "many_functions", module)
    for n in range(number):
        assert await pair[0].call("worker1", getattr(module, f"f{n}")) == n
    seen = await scrape(pair[0])
    for side in ("client", "server"):
        name = DURATION.format(side, "count")
        assert len(seen.labels(name, "rpc_method")) == MOST_FUNCTIONS + 1
        assert seen.of(name, rpc_method=OTHER) == 100
        assert seen.of(name, rpc_method="many_functions/f0") == 1
        assert seen.of(name) == number


# --- everything else --------------------------------------------------------------------------------------------------


async def test_every_metric_is_there_with_its_kind(pair: list[Worker]) -> None:
    """Each has its type line, and what is counted ends in ``_total``."""
    await pair[0].call("worker1", abs, 1)
    seen = await scrape(pair[0])
    kinds = {measure.name.removesuffix("_total"): measure.kind for measure in MEASURES}
    assert {name: kind for name, kind in seen.kinds.items() if not name.startswith("process_")} == kinds
    assert all(measure.name.endswith("_total") == (measure.kind == "counter") for measure in MEASURES)
    assert seen.of("process_open_fds") > 0
    assert seen.of("aiorpc_worker_info", worker="worker1", rank="1", pid=str(os.getpid())) == 1
    assert seen.of("aiorpc_group_workers", worker="worker0") == 2


def test_the_reference_lists_every_metric() -> None:
    """With its kind, its labels, and what it is, in the order of the code."""
    text = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
    rows = [tuple(each) for each in re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.+) \|$", text, re.MULTILINE)]
    assert rows == [
        (measure.name, measure.kind, ", ".join(f"`{label}`" for label in measure.labels), measure.meaning)
        for measure in MEASURES
    ]


async def test_queues_and_published_values_are_shown() -> None:
    """Items, what waits, versions at both ends, and how far a reader is behind."""
    async with cluster(2, options=ANY) as (here, there):
        queue: rpc.Queue[int] = here.Queue("samples", maxsize=2)
        await queue.put(1)
        await queue.put(2)
        waiting = queue.put(3)
        got = there.queue("samples", owner="worker0")
        async with there.subscribe("policy") as versions:
            await here.publish("policy", torch.ones(3))
            assert (await anext(versions)).version == 1
            second = await here.publish("policy", torch.ones(3))
            await second.delivered()
            seen = await scrape(here)
            assert seen.of("aiorpc_queue_items", queue="samples", worker="worker0") == 2
            assert seen.of("aiorpc_queue_waiting_putters", queue="samples") == 1
            assert seen.of("aiorpc_published_version", name="policy", worker="worker0") == 2
            assert seen.of("aiorpc_published_reader_lag_versions", name="policy", reader="worker1") == 0
            assert seen.of("aiorpc_subscription_version", name="policy", worker="worker1") == 2
            assert seen.of("aiorpc_subscription_taken_version", name="policy", worker="worker1") == 1
            older = seen.of("aiorpc_subscription_taken_age_seconds", name="policy", worker="worker1")
            assert 0 < seen.of("aiorpc_published_age_seconds", name="policy") < older < LIMIT
        assert await got.get() == 1
        await waiting
        seen = await scrape(here)
        assert seen.of("aiorpc_queue_waiting_putters", queue="samples") == 0
        assert seen.of("aiorpc_queue_unfinished_items", queue="samples") == 1
        assert "aiorpc_subscription_version" not in {each.name for each in seen.samples}


async def test_references_contexts_and_streams_are_shown(pair: list[Worker]) -> None:
    """While they are there, and not afterwards."""
    reference = pair[0].remote("worker1", torch.ones, 3)
    await reference
    stream = pair[0].stream("worker1", count, 10_000)
    assert await anext(stream) == 0
    inside = pair[0].call("worker0", stand_in_a_context, "context")
    await until(lambda: "context" in GATES)
    seen = await scrape(pair[0])
    assert seen.of("aiorpc_references", state="owned", worker="worker1") == 1
    assert seen.of("aiorpc_references", state="held", worker="worker0") == 1
    assert seen.of("aiorpc_streams", side="client", worker="worker0") == 1
    assert seen.of("aiorpc_streams", side="server", worker="worker1") == 1
    assert seen.of("aiorpc_autograd_contexts", worker="worker0") == 1
    GATES["context"].set()
    await inside
    await stream.aclose()
    del reference, stream
    await until(lambda: not pair[1].statistics().references_owned and not pair[1].statistics().calls_running)
    seen = await scrape(pair[0])
    assert seen.of("aiorpc_references") == seen.of("aiorpc_streams") == seen.of("aiorpc_autograd_contexts") == 0


async def test_bytes_are_counted_by_worker_and_channel_also_when_links_have_ended() -> None:
    """They only grow: what a link has moved is kept when its worker has left."""
    store = HashStore()
    async with cluster(1, options=ANY, dynamic=True, store=store) as (here,):
        for name in ("first", "second"):
            async with Worker(name, store=store, options=ANY) as there:
                await here.call(name, torch.numel, torch.zeros(250_000))
                while_open = await scrape(here)
            await until(lambda: len(here.worker_infos()) == 1 and here.statistics().connections == 0)
            seen = await scrape(here)
            labels = {"peer": name, "worker": "worker0"}
            assert seen.of("aiorpc_channel_sent_bytes_total", channel="inline", **labels) == 1_000_000
            assert seen.of("aiorpc_channel_sent_transfers_total", channel="inline", **labels) == 1
            for metric in ("aiorpc_sent_bytes_total", "aiorpc_received_bytes_total", "aiorpc_sent_messages_total"):
                assert seen.of(metric, **labels) >= while_open.of(metric, **labels) > 0
            assert there.closed
        assert 1_000_000 < seen.of("aiorpc_sent_bytes_total", peer="first") < 1_010_000
        assert seen.labels("aiorpc_sent_bytes_total", "worker") == {"worker0"}


@pytest.mark.slow
def test_a_process_shows_shared_memory_and_losses() -> None:
    """Tensors to another process of the host go by shared memory; a killed worker is counted."""
    with process_cluster(2, options=ANY) as group:
        address = group.worker.metrics_address
        assert address is not None
        for _ in range(3):  # the first finds the memory not mapped yet
            assert group.worker.call("worker0", torch.numel, torch.zeros(250_000)).wait() == 250_000
        seen = Scrape(read(address))
        sent = seen.of("aiorpc_channel_sent_bytes_total", channel="shared memory", peer="worker0", worker="test")
        assert sent in (2_000_000, 3_000_000)
        assert seen.of("aiorpc_shared_memory_size_bytes") >= seen.of("aiorpc_shared_memory_used_bytes") >= 0
        assert seen.of("aiorpc_shared_memory_resident_bytes") > 1_000_000
        theirs = group.worker.call("worker0", own_address).wait()
        assert theirs != address
        assert Scrape(read(theirs)).labels("aiorpc_group_workers", "worker") == {"worker0"}
        assert (seen.of("aiorpc_group_workers"), seen.of("aiorpc_lost_workers_total")) == (3, 0)
        group.kill("worker0")
        with pytest.raises(rpc.PeerLost):
            group.worker.call("worker0", abs, 1).wait()
        seen = Scrape(read(address))
        assert (seen.of("aiorpc_group_workers"), seen.of("aiorpc_lost_workers_total")) == (2, 1)
        assert seen.of("aiorpc_channel_sent_bytes_total", channel="shared memory", peer="worker0") == sent


def own_address() -> str:
    return rpc.current().metrics_address or ""


# --- the server -------------------------------------------------------------------------------------------------------


async def test_workers_of_a_process_share_an_address(caplog: pytest.LogCaptureFixture) -> None:
    """Each has its label, also if several groups have the same names; the last one that leaves closes the server."""
    caplog.set_level(logging.INFO, "aiorpc")
    options = RpcBackendOptions(metrics=f"127.0.0.1:{free_port()}")
    async with cluster(1, options=options) as (first,):
        async with cluster(2, options=options) as (second, _):
            assert first.metrics_address == second.metrics_address == options.metrics
            seen = await scrape(second)
            assert seen.labels("aiorpc_group_workers", "worker") == {"worker0", "worker0:2", "worker1"}
        seen = await scrape(first)
        assert seen.labels("aiorpc_group_workers", "worker") == {"worker0"}
        assert f"metrics at http://{options.metrics}/metrics" in caplog.text
    assert first.metrics_address is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(str(options.metrics).rpartition(":")[2])))


@pytest.mark.parametrize(("option", "there"), [(None, True), ("", False), ("127.0.0.1:0", True)])
async def test_the_environment_is_for_workers_without_the_option(
    option: str | None, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option wins, and an empty one turns metrics off. Without either there are none."""
    port = free_port()
    monkeypatch.setenv("AIORPC_METRICS", f"127.0.0.1:{port}")
    async with cluster(1, options=RpcBackendOptions(metrics=option)) as (worker,):
        address = worker.metrics_address
        assert (address is not None) == there
        assert (address == f"127.0.0.1:{port}") == (option is None)
    monkeypatch.delenv("AIORPC_METRICS")
    async with cluster(1) as (worker,):
        assert worker.metrics_address is None


async def refused(options: RpcBackendOptions | None = None) -> str:
    """Why a worker with these options does not join. Nothing has been written into its store."""
    store = HashStore()
    with pytest.raises(rpc.RpcUsageError) as caught:
        await Worker("alone", rank=0, world_size=1, store=store, options=options).start()
    assert store.num_keys() == 0
    return str(caught.value)


async def test_a_port_in_use_is_told_before_joining() -> None:
    """With the address, the option, and what to do; a worker of another process cannot share it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        text = await refused(RpcBackendOptions(metrics=address))
    assert "worker 'alone'" in text and f"at {address} (option metrics): Address already in use" in text
    assert "port 0" in text


@pytest.mark.parametrize("address", ["9400", "localhost", "host:port", "127.0.0.1:99999", "::1:9400", ":9400"])
async def test_what_is_no_address_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an option when the options are made, from the environment before the worker joins."""
    with pytest.raises(rpc.RpcUsageError, match=r"^metrics must be host:port, such as 127\.0\.0\.1:9400"):
        RpcBackendOptions(metrics=address)
    monkeypatch.setenv("AIORPC_METRICS", address)
    assert (await refused()).startswith("AIORPC_METRICS must be host:port")


async def test_an_unknown_host_is_told() -> None:
    """Before joining, with its name."""
    assert "no-such-host.invalid" in await refused(RpcBackendOptions(metrics="no-such-host.invalid:0"))


async def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import that fails is told with the name of the extra."""
    monkeypatch.delitem(sys.modules, serving.__name__)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)  # as if it were not there
    assert "pip install 'aiorpc-torch[metrics]'" in await refused(ANY)


async def test_an_address_that_others_reach_needs_a_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without one the worker does not join; with one a reader has to show it, on each address."""
    anywhere = RpcBackendOptions(metrics="0.0.0.0:0")
    assert "AIORPC_METRICS_TOKEN" in await refused(anywhere)
    monkeypatch.setenv("AIORPC_METRICS_TOKEN", "short")
    assert "at least 16 characters" in await refused(anywhere)
    monkeypatch.delenv("AIORPC_METRICS_TOKEN")
    file = tmp_path / "token"
    monkeypatch.setenv("AIORPC_METRICS_TOKEN_FILE", str(file))
    assert "cannot be read" in await refused(anywhere)
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o644)
    assert "others than this user can read" in await refused(anywhere)
    file.chmod(0o600)
    for options in (anywhere, ANY):
        async with cluster(1, options=options) as (worker,):
            port = str(worker.metrics_address).rpartition(":")[2]
            for shown in ("", "a token of thirty-two charactres"):
                with pytest.raises(urllib.error.HTTPError) as caught:
                    await asyncio.to_thread(read, f"127.0.0.1:{port}", shown)
                assert (caught.value.code, caught.value.read()) == (401, b"")
            text = await asyncio.to_thread(read, f"127.0.0.1:{port}", TOKEN)
            assert Scrape(text).of("aiorpc_group_workers") == 1
    monkeypatch.setenv("AIORPC_METRICS_TOKEN", TOKEN)
    assert "twice" in await refused(anywhere)


async def test_a_worker_that_is_given_up_leaves_no_server() -> None:
    """Cancelled at any moment of joining, or refused there."""
    for turns in range(30):
        joining = asyncio.ensure_future(
            Worker("one", rank=0, world_size=2, store=HashStore(), options=ANY).start()  # the other one never comes
        )
        for _ in range(turns):
            await asyncio.sleep(0)
        await asyncio.sleep(turns / 1000)
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining
    await until(lambda: not [each for each in threading.enumerate() if "metrics" in each.name])


async def test_a_forked_child_lets_go_of_the_port() -> None:
    """When the worker has left, another program can have its port, although the child lives."""
    async with cluster(1, options=ANY) as (worker,):
        address = str(worker.metrics_address)
        ended, end = os.pipe()
        child = os.fork()
        if not child:
            os.close(end)
            os.read(ended, 1)
            os._exit(0)
        await scrape(worker)
    try:
        socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))).close()
    finally:
        os.close(end)
        os.close(ended)
        assert await asyncio.to_thread(os.waitpid, child, 0) == (child, 0)


# --- readers that stand still, are slow, or die -----------------------------------------------------------------------


def readers() -> int:
    """How many threads answer readers of metrics in this process."""
    return sum(each.name.endswith("-reader") for each in threading.enumerate())


async def test_readers_that_stand_still_hold_nothing_up(pair: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number is bounded; they are cut off, and another reader then gets its answer. Calls go on meanwhile."""
    monkeypatch.setattr(serving.Reader, "timeout", 1.0)
    host, _, port = str(pair[0].metrics_address).rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(3 * serving.MOST_READERS)]
    try:
        await until(lambda: readers() == serving.MOST_READERS)
        for _ in range(200):
            assert await pair[0].call("worker1", abs, -3) == 3
            assert readers() <= serving.MOST_READERS
        await until(lambda: not readers())
        assert (await scrape(pair[0])).of(DURATION.format("client", "count")) == 200
    finally:
        for each in silent:
            each.close()


SCRAPER = """
import socket, sys, time
host, port = sys.argv[1].rsplit(":", 1)
way = sys.argv[2]
while True:
    with socket.create_connection((host, int(port))) as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.sendall(b"GET /metrics HTTP/1.0\\r\\n\\r\\n")
        print("began", flush=True)
        while reader.recv(512 if way == "slow" else 1 << 20):
            if way == "slow":
                time.sleep(0.02)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["slow", "stopped", "killed"])
async def test_a_reader_in_another_process_disturbs_no_call(pair: list[Worker], way: str) -> None:
    """One that reads slowly, one that is stopped and goes on, and ones that are killed: calls go on, nothing stays."""
    address = str(pair[0].metrics_address)

    def begin() -> subprocess.Popen[str]:
        made = subprocess.Popen([sys.executable, "-c", SCRAPER, address, way], stdout=subprocess.PIPE, text=True)
        assert made.stdout is not None and made.stdout.readline() == "began\n"
        return made

    process = await asyncio.to_thread(begin)
    open_ones: list[int] = []
    try:
        for number in range(6):
            if way == "stopped":
                os.kill(process.pid, 19 if number % 2 == 0 else 18)
            elif way == "killed":
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()
                process = await asyncio.to_thread(begin)
            for _ in range(100):
                assert await pair[0].call("worker1", abs, -3) == 3
            assert readers() <= serving.MOST_READERS
            open_ones.append(len(os.listdir("/proc/self/fd")))
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    await until(lambda: not readers())
    # The two workers have opened one more connection to each other meanwhile, or not: four descriptors at most.
    assert max(open_ones) <= open_ones[0] + serving.MOST_READERS + 4
    await until(lambda: len(os.listdir("/proc/self/fd")) <= open_ones[0] + 4)
    assert (await scrape(pair[0])).of(DURATION.format("client", "count")) == 600


async def test_counters_only_grow_while_members_come_and_go(caplog: pytest.LogCaptureFixture) -> None:
    """In whatever moment of a connection they are read; no reading fails."""
    texts: list[str] = []
    stop = threading.Event()

    def go_on(address: str) -> None:
        while not stop.is_set():
            texts.append(read(address))

    store = HashStore()
    async with cluster(1, options=ANY, dynamic=True, store=store) as (here,):
        reading = asyncio.create_task(asyncio.to_thread(go_on, str(here.metrics_address)))
        for number in range(12):
            async with Worker(f"actor{number % 3}", store=store) as there:
                await asyncio.gather(*(here.call(there.name, torch.numel, torch.zeros(5000)) for _ in range(20)))
                await there.call("worker0", abs, -1)
        stop.set()
        await reading
    assert len(texts) > 3 and "cannot be read" not in caplog.text
    before: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    counters = {measure.name for measure in MEASURES if measure.kind == "counter"}
    for text in texts:
        now = {
            (each.name, tuple(sorted(each.labels.items()))): each.value
            for each in Scrape(text).samples
            if each.name in counters or each.name.endswith(("_bucket", "_count"))
        }
        assert [(key, value, now.get(key)) for key, value in before.items() if now.get(key, -1.0) < value] == []
        before = now
    assert sum(value for (name, _), value in before.items() if name == "aiorpc_sent_bytes_total") > 12 * 20 * 20_000


async def test_a_worker_that_leaves_while_it_is_read_leaves_at_once() -> None:
    """Readers get whole answers, or none; the worker does not wait for one that stands still."""
    texts: list[str] = []
    stop = threading.Event()

    def go_on(address: str) -> None:
        while not stop.is_set():
            try:
                texts.append(read(address))
            except (OSError, http.client.HTTPException):
                continue

    async with cluster(2, options=ANY) as workers:
        address = str(workers[0].metrics_address)
        reading = asyncio.create_task(asyncio.to_thread(go_on, address))
        host, _, port = address.rpartition(":")
        silent = socket.create_connection((host, int(port)))
        for _ in range(100):
            await workers[0].call("worker1", abs, 1)
        await until(lambda: len(texts) > 3)
    stop.set()
    await reading
    silent.close()
    assert all(Scrape(text).of("process_open_fds") for text in texts)
