"""A model behind HTTP: what many clients ask at once is one run of the model, and none of them waits past a deadline.

pip install starlette uvicorn
python examples/inference_service.py                       # the model's worker
uvicorn --app-dir examples inference_service:app           # the service; several processes of it, too
curl localhost:8000/infer -H 'X-Timeout: 0.5' -d '{"row": [1, 0, 0, 1]}'
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import aiorpc as rpc

MEET = os.environ.get("MEET", f"file://{tempfile.gettempdir()}/inference_service-{os.getuid()}")
LONGEST = 10.0  # seconds for a request, and for one that names no limit
WAITING = 64  # requests of a web process that the model may have; more are turned away
MODEL = torch.nn.Linear(4, 2)


@rpc.batched(max_size=32, max_wait=0.002)
def predict(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """One run of the model for up to 32 requests, 2 ms after the first of them at the latest."""
    with torch.inference_mode():
        return list(MODEL(torch.stack(rows)))


async def infer(request: Request) -> Response:
    """POST {"row": [4 numbers]}: what the model makes of it."""
    try:
        row = torch.tensor((await request.json())["row"], dtype=torch.float32).reshape(4)
        seconds = max(0.001, min(float(request.headers.get("X-Timeout", LONGEST)), LONGEST))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        return JSONResponse({"error": str(error)}, 400)
    try:
        call = request.app.state.worker.peer("model", timeout=seconds).call(predict, row)
        answer = await unless_gone(request, call)
    except (rpc.Overloaded, rpc.PeerLost, rpc.PeerLeft) as error:
        return JSONResponse({"error": str(error)}, 503, headers={"Retry-After": "1"})
    except rpc.RpcTimeout as error:
        return JSONResponse({"error": str(error)}, 504)
    return Response(status_code=499) if answer is None else JSONResponse({"answer": answer.tolist()})


async def unless_gone(request: Request, call: rpc.Future[Any]) -> Any:
    """The result of a call. If the client goes away before, the call is cancelled, and the result is None."""
    answer = asyncio.ensure_future(call)
    gone = asyncio.ensure_future(request.receive())  # the body has been read: next comes `http.disconnect`
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else None
    finally:
        answer.cancel()
        gone.cancel()


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    """While it serves, this process is a worker."""
    options = rpc.RpcBackendOptions(max_pending_calls=WAITING)
    async with rpc.init(f"web-{os.getpid()}", init_method=MEET, options=options) as app.state.worker:
        await app.state.worker.wait_for("model")
        yield


app = Starlette(routes=[Route("/infer", infer, methods=["POST"])], lifespan=lifespan)


async def serve() -> None:
    """The model's worker: it runs `predict` for whoever calls it."""
    async with rpc.init("model", init_method=MEET):
        await asyncio.Event().wait()


if __name__ == "__main__":
    # By its real name, not __main__: that is the name by which the service calls `predict`.
    asyncio.run(importlib.import_module("inference_service").serve())
