"""The server of the page: whom it answers, what it tells of a real group, and what it refuses. Without a browser."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import aiorpc as rpc
from aiorpc.observability import reader
from aiorpc.observability.dashboard.serving import COOKIE, STATIC, application
from aiorpc.observability.dashboard.watching import KEPT, Watcher
from aiorpc.observability.reader import SeenGroup
from aiorpc.observability.report import Look, SeenEvent, WorkerReport
from aiorpc.testing import cluster
from tests.settling import until

LIMIT = 30.0
TOKEN = "correct-horse-battery"
ROOT = Path(__file__).resolve().parents[2]


def client(token: str = "", host: str = "localhost") -> httpx.AsyncClient:
    """Asks the server without a socket."""
    transport = httpx.ASGITransport(application(Watcher(look=list), token))
    return httpx.AsyncClient(transport=transport, base_url=f"http://{host}:8265")


# --- who is answered ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "LOCALHOST"])
async def test_this_host_is_answered(host: str) -> None:
    """By its name or a loopback address; all answers forbid what the page does not need."""
    async with client(host=host) as asking:
        answer = await asking.get("/")
    assert answer.status_code == 200 and "<title>aiorpc</title>" in answer.text
    assert answer.headers["content-security-policy"].startswith("default-src 'self'")
    assert answer.headers["cache-control"] == "no-store" and answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "192.168.0.7"])
async def test_another_name_of_this_host_is_not_answered(host: str) -> None:
    """A page elsewhere whose name was turned to 127.0.0.1 would send it."""
    async with client(host=host) as asking:
        for path in ("/", "/live", "/worker?name=a", "/static/page.js"):
            answer = await asking.get(path)
            assert answer.status_code == 403 and "http://localhost" in answer.text


@pytest.mark.parametrize("token", ["", TOKEN])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_nothing_can_be_changed(method: str, token: str) -> None:
    """There is no method but GET, also with the token."""
    async with client(token) as asking:
        for path in ("/", "/live", "/worker"):
            answer = await asking.request(method, path, headers={"Authorization": f"Bearer {token}"})
            assert answer.status_code == 405


async def test_who_shows_the_token_is_answered() -> None:
    """In a header, or once in the address, which sets a cookie and leaves the address; under any name of the host."""
    async with client(TOKEN, "train7.example") as asking:
        for path in ("/live", "/worker?name=a", "/static/page.js", "/worker?token=wrong", "/?token=wrong-token"):
            answer = await asking.get(path)
            assert answer.status_code == 401, path
        assert "<form" in (await asking.get("/")).text
        answer = await asking.get("/static/page.js", headers={"Authorization": f"Bearer {TOKEN}"})
        assert answer.status_code == 200
        answer = await asking.get("/", params={"token": TOKEN})
        assert answer.status_code == 303 and answer.headers["location"] == "/"
        assert "HttpOnly" in answer.headers["set-cookie"] and "SameSite=strict" in answer.headers["set-cookie"]
        assert (await asking.get("/static/page.js")).status_code == 200
        asking.cookies.clear()
        asking.cookies.set(COOKIE, f"{TOKEN}x")
        assert (await asking.get("/static/page.js")).status_code == 401


async def test_files_outside_are_not_served() -> None:
    """The folder of the page, and nothing else."""
    async with client() as asking:
        for path in ("/static/../serving.py", "/static/%2e%2e/serving.py", "/static//etc/passwd", "/static/nothing"):
            assert (await asking.get(path)).status_code == 404


def test_the_page_needs_no_other_host() -> None:
    """What it loads lies beside it, with the licence of what others have written."""
    for path in STATIC.iterdir():
        for address in re.findall(r"https?://[^\s\"')]+", path.read_text(encoding="utf-8")):
            assert path.name in ("uPlot.iife.min.js", "uPlot.LICENSE") or address == "http://www.w3.org/2000/svg"
    assert "MIT" in (STATIC / "uPlot.LICENSE").read_text()
    page = (STATIC / "page.html").read_text()
    loaded = re.findall(r'(?:src|href)="/static/([^"]+)"', page)
    assert len(loaded) == 5 and all((STATIC / name).exists() for name in loaded)
    assert not re.search(r"\son\w+=|<script>|style=", page)  # the policy forbids them
    assert "innerHTML" not in (STATIC / "page.js").read_text()


# --- what is told -------------------------------------------------------------------------------------------------


def _own() -> list[SeenGroup]:
    groups = reader.groups(question=Look(tally=True))
    return [group for group in groups if any(report.pid == os.getpid() for report in group.reports)]


async def own_things() -> None:
    """Handler: this worker has a queue with two items, and publishes weights."""
    jobs: rpc.Queue[int] = rpc.Queue("jobs", maxsize=5)
    await jobs.put(1)
    await jobs.put(2)
    await rpc.publish("policy", torch.zeros(3))


async def read() -> None:
    """Handler: this worker reads the weights for as long as it lives."""
    versions = rpc.subscribe("policy")
    rpc.current().versions = versions  # type: ignore[attr-defined]
    await anext(versions)


def sleep(seconds: float) -> None:
    """Handler."""
    time.sleep(seconds)


async def test_it_tells_what_the_group_did() -> None:
    """Workers, calls, traffic, queues, weights, who waits: as JSON; what a page has is not told again."""
    watcher = Watcher()
    async with cluster(3) as (a, _, _):
        await a.call("worker0", own_things)
        await a.call("worker1", read)
        watcher.note(await asyncio.to_thread(_own), 1000.0)
        waiting = asyncio.ensure_future(a.call("worker2", sleep, 2.5))
        for _ in range(10):
            await a.call("worker1", torch.numel, torch.zeros(100_000))
        await asyncio.sleep(1.2)
        watcher.note(await asyncio.to_thread(_own), 1001.0)
        turn, data = watcher.message()
        later, new = watcher.message(turn)
        await waiting
    told = json.loads(data)
    assert told["whole"] and not told["trouble"]
    (group,) = told["groups"]
    shown = group["shown"]
    assert [(worker["name"], worker["state"]) for worker in shown["workers"]] == [
        (f"worker{number}", "running") for number in range(3)
    ]
    assert shown["workers"][0]["made_calls"] == 15 and shown["workers"][0]["rates"]["memory"] > 50_000_000
    calls = {(call["worker"], call["side"], call["function"], call["peer"]): call["rate"] for call in shown["calls"]}
    assert set(calls) == {
        ("worker0", "made", "torch:numel", "worker1"),
        ("worker1", "served", "torch:numel", "worker0"),
    }
    flows = {(flow["sender"], flow["receiver"]): flow["rate"] for flow in shown["flows"]}
    assert flows["worker0", "worker1"] > 1_000_000 and flows["worker1", "worker0"] < 10_000
    (queue,) = shown["queues"]
    assert queue["owner"] == "worker0" and queue["queue"]["name"] == "jobs" and queue["queue"]["length"] == 2
    (name,) = shown["names"]
    assert (name["owner"], name["name"], name["version"]) == ("worker0", "policy", 1)
    (read_by,) = name["readers"]
    assert (read_by["worker"], read_by["version"], read_by["behind"]) == ("worker1", 1, 0) and read_by["age"] > 0
    (wait,) = shown["waits"]
    assert (wait["worker"], wait["to"], wait["state"]) == ("worker0", "worker2", "running")
    assert wait["function"].endswith(":sleep") and wait["since"] > 1 and not wait["circle"]
    assert f"{Path(__file__).name}:" in wait["made_at"] + wait["stands_at"]
    (point,) = group["points"]
    assert point["queues"] == {"jobs of worker0": 2} and point["ages"] == {"policy at worker1": 0}
    assert point["calls"] == pytest.approx(calls["worker0", "made", "torch:numel", "worker1"])
    again = json.loads(new)
    assert later == turn and not again["whole"] and again["groups"][0]["points"] == []


def _report(name: str, mark: str, *events: SeenEvent) -> WorkerReport:
    return WorkerReport(
        name=name, mark=mark, pid=int(mark), events=list(events), state="running", init_method="file:///meet"
    )


def test_groups_that_go_are_kept_for_a_while() -> None:
    """They are told as gone, then forgotten; another group of the same names is another one."""
    watcher = Watcher()
    watcher.note([SeenGroup([_report("a", "1")])], 1000.0)
    watcher.note([], 1001.0)
    watcher.note([SeenGroup([_report("a", "2")])], 1002.0)
    told = json.loads(watcher.message()[1])["groups"]
    assert [(group["key"], group["gone"]) for group in told] == [(1, 1001.0), (2, 0.0)]
    watcher.note([SeenGroup([_report("a", "2")])], 1002.0 + KEPT)
    told = json.loads(watcher.message()[1])["groups"]
    assert [group["key"] for group in told] == [2]


def test_one_group_can_be_meant() -> None:
    """That of a worker; others are not shown."""
    watcher = Watcher("b")
    watcher.note([SeenGroup([_report("a", "1")]), SeenGroup([_report("b", "2"), _report("c", "3")])], 1000.0)
    (group,) = json.loads(watcher.message()[1])["groups"]
    assert [worker["name"] for worker in group["shown"]["workers"]] == ["b", "c"]


def test_an_event_that_several_saw_is_told_once() -> None:
    """And one that happens again later, again."""
    lost = [SeenEvent(1000.0 + delay, "WorkerLost", "c", "killed") for delay in (0.0, 0.4, 20.0)]
    watcher = Watcher()
    watcher.note([SeenGroup([_report("a", "1", lost[0], lost[2]), _report("b", "2", lost[1])])], 1021.0)
    watcher.note([SeenGroup([_report("a", "1", lost[0], lost[2]), _report("b", "2", lost[1])])], 1022.0)
    (group,) = json.loads(watcher.message()[1])["groups"]
    assert [(event["time"], event["seen_by"]) for event in group["events"]] == [(1000.0, "a"), (1020.0, "a")]


async def test_a_look_that_fails_is_told() -> None:
    """The page says so, and the next look is made."""
    looks = 0

    def look() -> list[SeenGroup]:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise PermissionError("no")
        return []

    watcher = Watcher(look=look)
    running = asyncio.create_task(watcher.run())
    try:
        await watcher.next()
        assert "PermissionError: no" in json.loads(watcher.message()[1])["trouble"]
        watcher.enter()  # a page is open: the next look is soon
        async with asyncio.timeout(LIMIT):
            await watcher.next()
        assert json.loads(watcher.message()[1])["trouble"] == ""
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def test_a_click_gets_stacks_and_log() -> None:
    """Of the process that was asked for; a worker that has gone is said to have."""
    async with cluster(2) as (a, b), client() as asking:
        waiting = asyncio.ensure_future(a.call("worker1", sleep, 1.0))
        await until(lambda: b.statistics().calls_running == 1)
        answer = await asking.get("/worker", params={"name": "worker1", "pid": os.getpid()})
        told = answer.json()
        assert "serves" in told["stacks"] and "in sleep" in told["stacks"] and told["log"] == []
        answer = await asking.get("/worker", params={"name": "worker9", "pid": "x"})
        assert "no worker 'worker9' here" in answer.json()["stacks"]
        await waiting


# --- the command --------------------------------------------------------------------------------------------------


def command(*arguments: str, path: Path | None = None) -> subprocess.Popen[str]:
    """Start it. path: a folder of modules that come first."""
    environment = {**os.environ, "PYTHONPATH": f"{path or ROOT}{os.pathsep}{ROOT}"}
    return subprocess.Popen(
        [sys.executable, "-m", "aiorpc", "dashboard", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def refused(*arguments: str, path: Path | None = None) -> str:
    """What it says when it cannot serve."""
    with command(*arguments, path=path) as process:
        _, said = process.communicate(timeout=LIMIT)
    assert process.returncode == 1 and said.startswith("python -m aiorpc dashboard: ") and said.count("\n") == 1
    return said


@contextlib.contextmanager
def served(*arguments: str, path: Path | None = None) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """It serves: its address, and its process."""
    with command(*arguments, path=path) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


@contextlib.asynccontextmanager
async def live(url: str, **how: Any) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """The messages that a page gets."""
    async with httpx.AsyncClient(timeout=LIMIT) as asking, asking.stream("GET", f"{url}live", **how) as answer:

        async def messages() -> AsyncIterator[dict[str, Any]]:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))

        yield messages()


def test_it_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """Another host without a token, a token that others can read, a port that is none, an unknown host."""
    assert "other hosts can open the page" in refused("--host", "0.0.0.0")
    assert "is not known here" in refused("--host", "no.such.host.invalid")
    assert "--port takes a number up to 65535" in refused("--port", "70000")
    token = tmp_path / "token"
    assert "cannot be read" in refused("--token-file", str(token))
    token.write_text("short")
    token.chmod(0o600)
    assert "at least 16 characters" in refused("--token-file", str(token))
    token.write_text(TOKEN)
    token.chmod(0o644)
    assert "others than this user can read" in refused("--token-file", str(token))
    assert "cannot be read: Is a directory" in refused("--token-file", str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    assert "is no file" in refused("--token-file", str(tmp_path / "pipe"))


def test_without_starlette_it_says_what_to_install(tmp_path: Path) -> None:
    """By the name of the extra."""
    (tmp_path / "starlette").mkdir()
    (tmp_path / "starlette" / "__init__.py").write_text("raise ImportError('no starlette here')")
    assert "pip install 'aiorpc-torch[dashboard]'" in refused(path=tmp_path)


@pytest.mark.slow
async def test_it_serves_without_torch_and_ends_with_its_pages(tmp_path: Path) -> None:
    """Live messages come by HTTP; an interrupt ends the server although a page is open; a second one is refused."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    async with cluster(2):
        with served("--port", "0", path=tmp_path) as (url, process):
            port = url.rpartition(":")[2].strip("/")
            said = await asyncio.to_thread(refused, "--port", port)
            assert f"cannot listen at 127.0.0.1 port {port}" in said and "--port 0" in said
            async with live(url) as messages:
                seen = 0
                async for message in messages:
                    pids = {w["pid"] for group in message["groups"] for w in group["shown"]["workers"]}
                    seen += os.getpid() in pids
                    if seen == 3:
                        break
                memory = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                assert memory < 80_000_000
                process.send_signal(signal.SIGINT)
                assert await asyncio.to_thread(process.wait, LIMIT) == 0
            assert process.stderr is not None and "Traceback" not in process.stderr.read()


@pytest.mark.slow
async def test_other_hosts_are_served_with_a_token(tmp_path: Path) -> None:
    """At an address of all hosts, to who has it."""
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    with served("--host", "0.0.0.0", "--port", "0", "--token-file", str(token)) as (url, _):
        url = url.replace("0.0.0.0", "127.0.0.1")
        async with httpx.AsyncClient() as asking:
            assert (await asking.get(url)).status_code == 401
        async with live(url, headers={"Authorization": f"Bearer {TOKEN}"}) as messages:
            assert "groups" in await anext(messages)


@pytest.mark.slow
async def test_the_group_does_not_suffer_from_it() -> None:
    """A dashboard that is stopped or killed while it looks ends no call, and leaves no thread behind."""
    async with cluster(2) as (a, _):
        for _ in range(2):
            with served("--port", "0") as (url, process):
                async with live(url) as messages:
                    await anext(messages)
                    for _ in range(50):
                        assert await a.call("worker1", abs, -1) == 1
                    process.send_signal(signal.SIGSTOP)
                    for _ in range(50):
                        assert await a.call("worker1", abs, -1) == 1
                    process.kill()
                    with contextlib.suppress(httpx.HTTPError):
                        async for _ in messages:
                            pass
        assert await a.call("worker1", abs, -1) == 1
