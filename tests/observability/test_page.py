"""The page in a real browser, Debian's Chromium: what it shows is compared with what the group did. `make testpage`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from playwright.async_api import Browser, Page, async_playwright, expect

import aiorpc as rpc
from aiorpc.worker import Worker

CHROMIUM = "/usr/bin/chromium"
ROOT = Path(__file__).resolve().parents[2]
LIMIT = 30.0
EVIL = "<img src=x onerror=\"document.title='run'\">"

pytestmark = [pytest.mark.page, pytest.mark.slow, pytest.mark.time_limit(120)]
expect.set_options(timeout=LIMIT * 1000)

LOCKS = {"learner": threading.Lock(), "helper": threading.Lock()}


def hold(other: str) -> None:
    """Handler: hold the lock of this worker while it calls the other one, which does the same."""
    with LOCKS[rpc.current().name]:
        RUNNING.wait(LIMIT)
        rpc.rpc_sync(other, take, timeout=5.0)


def take() -> None:
    """Handler: take the lock of this worker."""
    with LOCKS[rpc.current().name]:
        pass


RUNNING = threading.Barrier(2)


async def own() -> None:
    """Handler: this worker has a queue."""
    rpc.current().samples = rpc.Queue("samples", maxsize=3)  # type: ignore[attr-defined]


def sleep(seconds: float) -> None:
    """Handler."""
    threading.Event().wait(seconds)


@contextlib.asynccontextmanager
async def member(meet: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A worker ``actor0`` in a process of its own, once it has joined; it leaves at the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.observability.member", "actor0", meet),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,  # a traceback of the interrupt
    )
    try:
        assert process.stdout is not None and await process.stdout.readline() == b"joined\n"
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        await process.communicate()


@contextlib.asynccontextmanager
async def dashboard() -> AsyncIterator[str]:
    """The address of the page."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "aiorpc", "dashboard", "--port", "0"), cwd=ROOT, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.send_signal(signal.SIGINT)
        await process.communicate()


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """The browser, without the network."""
    async with async_playwright() as playwright:
        arguments = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        try:
            yield browser
        finally:
            await browser.close()


@contextlib.asynccontextmanager
async def opened(browser: Browser, url: str, learner: Worker) -> AsyncIterator[Page]:
    """The page of the group of that worker. What its console says beside is an error."""
    page = await browser.new_page(viewport={"width": 1280, "height": 900})
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(url) else said.append(request.url))
    await page.goto(url)
    await expect(page.locator("#link")).to_have_text("live")
    ours = "[...groups.values()].find((each) => each.shown.title === meet)"  # others of this user may run here
    await page.wait_for_function(f"(meet) => {ours}", arg=learner.init_method)
    await page.evaluate(f"(meet) => {{ chosen = {ours}.key; show(); }}", learner.init_method)
    await expect(page.locator("#title")).to_have_text(f"free group at {learner.init_method}")
    yield page
    assert said == []


async def cells(page: Page, table: str, first: str) -> list[str]:
    """The cells of the row of a table that begins so."""
    row = page.locator(f"#{table} tbody tr", has=page.locator(f"td.name:text-is('{first}')")).first
    return await row.locator("td").all_text_contents()


async def number(page: Page, tile: str) -> str:
    """What a tile says."""
    return await page.locator(f"[data-tile='{tile}'] b").text_content() or ""


async def test_the_page_shows_what_the_group_does(tmp_path: Path) -> None:
    """Workers, calls, traffic, queues and weights, a loss and a return, who waits, a deadlock, stacks and log."""
    meet = f"file://{tmp_path}/meet"
    async with (
        rpc.init("learner", role="learner", init_method=meet) as learner,
        rpc.init("helper", init_method=meet) as helper,
        dashboard() as url,
        chromium() as browser,
    ):
        await learner.call("learner", own)
        await learner.publish("policy", torch.zeros(1000))
        async with member(meet) as actor, opened(browser, url, learner) as page:
            await _workers(page, actor.pid)
            await _calls(page, learner)
            await _values(page, learner)
            await _loss(page, actor)
            async with member(meet):
                await expect(page.locator("#workers tbody tr", has_text="actor0")).to_contain_text("running")
                await expect(page.locator("#events li[data-what=WorkerJoined]").first).to_contain_text("actor0 joined")
                assert await number(page, "workers") == "3"
            await _waiting(page, learner)
            await _deadlock(page, learner, helper)
            await _click(page)
            await _forms(page)


async def _workers(page: Page, pid: int) -> None:
    rows = page.locator("#workers tbody tr")
    await expect(rows).to_have_count(3)
    assert await rows.locator("td.name").all_text_contents() == ["actor0", "helper", "learner"]
    assert await rows.locator("td.state").all_text_contents() == ["running"] * 3
    (_, role, _, process, *_) = await cells(page, "workers", "actor0")
    assert role == "actor" and process.startswith(f"{pid} at ")


async def _calls(page: Page, learner: Worker) -> None:
    """Two hundred kilobytes a call go from learner to helper, and hardly anything comes back."""
    tensor, going = torch.zeros(50_000), True

    async def load() -> None:
        while going:
            await learner.call("helper", torch.numel, tensor)
            await asyncio.sleep(0.02)

    loading = asyncio.create_task(load())
    row = page.locator("#calls tbody tr", has_text="torch:numel").filter(has_text="serves")
    await expect(row).to_have_count(1)
    worker, way, peer, function, *_ = await row.locator("td").all_text_contents()
    assert (worker, way, peer, function) == ("helper", "serves", "learner", "torch:numel")
    there = page.locator("#traffic td[title^='learner to helper']")
    await expect(there).to_contain_text("MB")
    await expect(page.locator("#traffic td[title^='helper to learner']")).to_contain_text("B")
    await expect(page.locator("#chart-calls .u-legend")).to_contain_text("calls")
    before = learner.statistics().calls_made
    points = "current().points.filter((p) => p.time > {0}).map((p) => p.calls)"
    now = await page.evaluate("current().points.at(-1).time")
    await page.wait_for_function(f"() => {points.format(now)}.length >= 3")
    rates = await page.evaluate(points.format(now))
    seconds = await page.evaluate("current().points.at(-1).time") - now
    made = learner.statistics().calls_made - before
    assert made / seconds == pytest.approx(sum(rates) / len(rates), rel=0.5)
    going = False
    await loading
    await expect(page.locator("#calls td.empty")).to_have_text("no call has ended")


async def _values(page: Page, learner: Worker) -> None:
    """Three versions are published; the actor has put the number of each that it read, until the queue was full."""
    for _ in range(4):
        await learner.publish("policy", torch.ones(1000))
        await asyncio.sleep(0.1)
    reader = page.locator("#names tbody tr", has_text="actor0")
    await expect(reader.locator("td").nth(2)).to_have_text("5")
    await expect(page.locator("#names tbody tr").first).to_contain_text("published by learner")
    await expect(page.locator("#queues tbody tr")).to_have_count(1)
    assert (await cells(page, "queues", "samples"))[:5] == ["samples", "learner", "3", "3", "0"]
    await expect(page.locator("#waits li").first).to_contain_text("actor0 waits for")
    await expect(page.locator("#graph path[data-edge='actor0 learner']")).to_have_count(1)


async def _loss(page: Page, actor: asyncio.subprocess.Process) -> None:
    assert await number(page, "losses") == "0"
    actor.kill()
    await expect(page.locator("#events li[data-what=WorkerLost]")).to_contain_text("actor0 was lost")
    await expect(page.locator("#timeline circle.WorkerLost")).to_have_count(1)
    await expect(page.locator("#workers tbody tr", has_text="actor0")).to_contain_text("lost")
    assert await number(page, "losses") == "1" and await number(page, "workers") == "2 of 3"


async def _waiting(page: Page, learner: Worker) -> None:
    waiting = asyncio.ensure_future(learner.call("helper", sleep, 4.0))
    await expect(page.locator("#waits li", has_text="learner waits for")).to_contain_text("sleep on helper: running")
    await expect(page.locator("#waits li", has_text="learner waits for")).to_contain_text(f"{Path(__file__).name}:")
    await expect(page.locator("#graph path[data-edge='learner helper']")).to_have_count(1)
    await waiting
    await expect(page.locator("#graph path[data-edge='learner helper']")).to_have_count(0)


async def _deadlock(page: Page, learner: Worker, helper: Worker) -> None:
    calls = [
        asyncio.ensure_future(learner.call("helper", hold, "learner")),
        asyncio.ensure_future(helper.call("learner", hold, "helper")),
    ]
    await expect(page.locator("#findings li", has_text="deadlock")).to_contain_text("helper")
    await expect(page.locator("#graph path.circle[data-edge]")).to_have_count(2)
    await expect(page.locator("#waits li.bad").first).to_contain_text("hold")
    assert [type(each) for each in await asyncio.gather(*calls, return_exceptions=True)] == [rpc.RpcTimeout] * 2
    await expect(page.locator("#graph path.circle[data-edge]")).to_have_count(0)


async def _click(page: Page) -> None:
    """Stacks and log of a worker; what programs have written is text, also if it looks like a part of a page."""
    logging.getLogger("aiorpc").warning("worker helper: %s", EVIL)
    await page.locator("#workers tbody tr", has_text="helper").click()
    await expect(page.locator("#worker-name")).to_have_text("helper")
    await expect(page.locator("#worker-stacks")).to_contain_text("in ThreadPool._park")
    await expect(page.locator("#worker-log")).to_contain_text(EVIL)
    await expect(page.locator("#worker-log")).to_contain_text("was lost")
    await expect(page.locator("#worker-facts")).to_contain_text(f"process {os.getpid()} at ")
    await page.locator("#worker button", has_text="Close").click()
    await expect(page.locator("#worker")).to_be_hidden()
    assert await page.title() == "aiorpc"


async def _forms(page: Page) -> None:
    """Light and dark are different; nothing is wider than a phone."""
    backs = []
    for scheme in ("light", "dark"):
        await page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        backs.append(await page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert backs == ["rgb(246, 247, 249)", "rgb(20, 24, 30)"]
    for width in (1280, 390):
        await page.set_viewport_size({"width": width, "height": 844})
        await page.wait_for_timeout(1500)
        assert await page.evaluate("document.documentElement.scrollWidth") <= width


async def test_the_page_outlives_server_and_group(tmp_path: Path) -> None:
    """It says when the server or the group has gone, and goes on when they are there again."""
    meet = f"file://{tmp_path}/meet"
    async with chromium() as browser:
        async with dashboard() as url:
            async with rpc.init("learner", init_method=meet) as learner, opened(browser, url, learner) as page:
                await expect(page.locator("#workers tbody tr")).to_have_count(1)
            await expect(page.locator("#title")).to_contain_text("ended ")
            await expect(page.locator("#workers td.state")).to_have_text("ended")
        await expect(page.locator("#link")).to_have_text("no connection to the dashboard")
