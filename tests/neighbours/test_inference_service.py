"""examples/inference_service.py, a model behind starlette: batches, back-pressure, deadlines, clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import re
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aiorpc.testing import Faults
from tests.runtime.waiting import until

pytest.importorskip("starlette", reason="needs the extra `neighbours`")
httpx = pytest.importorskip("httpx", reason="needs the extra `neighbours`")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "inference_service.py"
ROW = {"row": [1.0, 0.0, 0.0, 1.0]}


class Model:
    """In the place of the example's: adds up each row. While it is held it answers nothing."""

    def __init__(self) -> None:
        self.runs: list[list[float]] = []
        self.begun = threading.Event()
        self.free = threading.Event()
        self.free.set()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        self.runs.append(rows.sum(dim=1).tolist())
        self.begun.set()
        self.free.wait()
        return rows.sum(dim=1, keepdim=True)


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example as a module, which functions are called by, with a model that can be held."""
    spec = importlib.util.spec_from_file_location("inference_service", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    module.MEET, module.MODEL = f"file://{tmp_path}/meet", Model()  # type: ignore[attr-defined]  # it has both
    yield module
    module.MODEL.free.set()


@contextlib.asynccontextmanager
async def running(service: Any) -> AsyncIterator[Any]:
    """The model's worker and the service, both in this process; a client of the latter."""
    model = asyncio.create_task(service.serve())
    try:
        transport = httpx.ASGITransport(service.app)
        async with (
            service.app.router.lifespan_context(service.app),
            httpx.AsyncClient(transport=transport, base_url="http://service", timeout=None) as client,
        ):
            yield client
            service.MODEL.free.set()
    finally:
        model.cancel()
        await asyncio.wait((model,))


async def until_held(service: Any) -> None:
    """The model has begun to run, and is held."""
    await asyncio.to_thread(service.MODEL.begun.wait)


async def test_requests_share_runs_of_the_model(service: Any) -> None:
    """Each gets its own answer, and there are fewer runs than requests."""
    async with running(service) as client:
        posts = [client.post("/infer", json={"row": [i, 0, 0, 1]}) for i in range(40)]
        answers = await asyncio.gather(*posts)
        assert [answer.json() for answer in answers] == [{"answer": [i + 1.0]} for i in range(40)]
        assert len(service.MODEL.runs) < 40


async def test_a_full_model_turns_requests_away(service: Any) -> None:
    """What is more than may wait gets 503 and when to come again, at once; those that wait are served."""
    service.WAITING = 3
    service.MODEL.free.clear()
    async with running(service) as client:
        posts = [asyncio.create_task(client.post("/infer", json=ROW)) for _ in range(10)]
        turned_away, waiting = set[Any](), set(posts)
        while len(turned_away) < 7:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            turned_away |= done
        answers = [post.result() for post in turned_away]
        assert {(each.status_code, each.headers["Retry-After"]) for each in answers} == {(503, "1")}
        service.MODEL.free.set()
        assert [(await post).status_code for post in waiting] == [200] * 3


async def test_a_deadline_ends_the_request_and_its_call(service: Any) -> None:
    """It gets 504, and what still waited for the model is never computed."""
    service.MODEL.free.clear()
    async with running(service) as client:
        first = asyncio.create_task(client.post("/infer", json=ROW))
        await until_held(service)
        late = await client.post("/infer", json={"row": [5.0, 0.0, 0.0, 0.0]}, headers={"X-Timeout": "0.1"})
        assert late.status_code == 504
        service.MODEL.free.set()
        assert (await first).status_code == 200
        assert (await client.post("/infer", json=ROW)).status_code == 200
        assert service.MODEL.runs == [[2.0], [2.0]]


async def test_the_call_of_a_client_that_goes_away_is_cancelled(service: Any) -> None:
    """The model never computes it, and the worker has no call under way for it."""
    service.MODEL.free.clear()
    async with running(service) as client:
        first = asyncio.create_task(client.post("/infer", json=ROW))
        await until_held(service)
        worker = service.app.state.worker
        held = len(worker.pending_calls())
        messages = asyncio.Queue[dict[str, Any]]()
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        body = json.dumps({"row": [5.0, 0.0, 0.0, 0.0]}).encode()
        messages.put_nowait({"type": "http.request", "body": body})
        scope = {"type": "http", "method": "POST", "path": "/infer", "query_string": b"", "headers": []}
        request = asyncio.create_task(service.app(scope, messages.get, send))
        await until(lambda: len(worker.pending_calls()) > held)
        messages.put_nowait({"type": "http.disconnect"})
        await request
        assert sent[0]["status"] == 499
        await until(lambda: len(worker.pending_calls()) == held)
        assert await worker.call("model", len, "abc") == 3  # by now the model's worker has read that it is cancelled
        service.MODEL.free.set()
        assert (await first).status_code == 200
        assert (await client.post("/infer", json=ROW)).status_code == 200
        assert service.MODEL.runs == [[2.0], [2.0]]


async def test_without_a_model_it_says_when_to_come_again(service: Any) -> None:
    """A model that dies ends the requests that wait for it: 503."""
    service.MODEL.free.clear()
    async with running(service) as client:
        request = asyncio.create_task(client.post("/infer", json=ROW))
        await until_held(service)
        with Faults(service.app.state.worker) as faults:
            await faults.kill("model")
        answer = await request
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        service.MODEL.free.set()


@pytest.mark.parametrize(
    ("body", "limit"), [({"row": [1, 2]}, "1"), ({"row": "x"}, "1"), ({}, "1"), (ROW, "soon"), ([], "1")]
)
async def test_what_is_no_row_is_the_clients_error(service: Any, body: Any, limit: str) -> None:
    """400, and the model hears nothing of it."""
    async with running(service) as client:
        answer = await client.post("/infer", json=body, headers={"X-Timeout": limit})
        assert answer.status_code == 400
        assert service.MODEL.runs == []


def test_the_page_quotes_the_example() -> None:
    """What docs/howto/inference_service.md shows of it stands in it."""
    page = (EXAMPLE.parents[1] / "docs" / "howto" / "inference_service.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^```py\n(.+?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(quoted) == 3
    assert all(each in EXAMPLE.read_text(encoding="utf-8") for each in quoted)
