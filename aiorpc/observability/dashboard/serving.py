"""The server of the page: what it answers, and to which browsers. Imports starlette and uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Callable
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from socket import socket as Socket
from urllib.parse import parse_qs

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import outside, reader
from ..reader import CannotLook, SeenGroup
from ..report import Look, Stacks, Text
from .watching import Watcher

STATIC = Path(__file__).parent / "static"
COOKIE = "aiorpc_token"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
#: Pages that are open at the same time, at most.
_MOST_PAGES = 20
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Guard:
    """Lets only those requests pass that may be answered, and puts headers on all answers.

    Only GET. Without a token only a host that is this one by name or address: a name of another page that was turned to
    this address (DNS rebinding) is none of these. With a token: who shows it, as ``Authorization: Bearer`` or by the
    cookie that ``/?token=...`` sets.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        """token: empty for none."""
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            return
        answer = self._refusal(Request(scope))
        await (answer or self._app)(scope, receive, _with_headers(send))

    def _refusal(self, request: Request) -> Response | None:
        """The answer of a request that is not passed on."""
        if request.method not in ("GET", "HEAD"):
            return Response("this page only shows things\n", 405, {"Allow": "GET, HEAD"}, "text/plain")
        if not self._token:
            if _host(request.headers.get("host", "")) in _LOOPBACK:
                return None
            return Response("open this page as http://localhost, or by 127.0.0.1\n", 403, media_type="text/plain")
        shown = parse_qs(request.url.query).get("token", [""])[0]
        if request.url.path == "/" and shown and self._fits(shown):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(COOKIE, shown, httponly=True, samesite="strict")
            return answer
        if self._fits(request.headers.get("authorization", "").removeprefix("Bearer ")) or self._fits(_cookie(request)):
            return None
        if request.url.path == "/":
            return FileResponse(STATIC / "token.html", 401)
        return Response("the token is missing, or is not the right one\n", 401, media_type="text/plain")

    def _fits(self, shown: str) -> bool:
        return hmac.compare_digest(shown.encode(errors="replace"), self._token)


def _host(header: str) -> str:
    """The name in a header ``Host``, without the port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()


def _cookie(request: Request) -> str:
    with contextlib.suppress(CookieError):
        found = SimpleCookie(request.headers.get("cookie", "")).get(COOKIE)
        return "" if found is None else found.value
    return ""


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
            names = {name for name, _ in own}
            kept = [(name, value) for name, value in message.get("headers", ()) if name.lower() not in names]
            message["headers"] = [*kept, *own]
        await send(message)

    return sending


def application(watcher: Watcher, token: str = "", ending: Callable[[], bool] = lambda: False) -> ASGIApp:
    """The page, its data, and what a click on a worker shows. ending: whether the server is to end."""
    pages = Pages(watcher, ending)
    routes = [
        Route("/", lambda request: FileResponse(STATIC / "page.html")),
        Route("/live", pages.live),
        Route("/worker", worker),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return Guard(Starlette(routes=routes), token)


class Pages:
    """The pages that are open."""

    def __init__(self, watcher: Watcher, ending: Callable[[], bool]) -> None:
        self._watcher = watcher
        self._ending = ending
        self._open = 0

    async def live(self, request: Request) -> Response:
        """A message after each look, as server-sent events, until the page is closed."""
        if self._open >= _MOST_PAGES:
            return Response(f"{_MOST_PAGES} pages are open already\n", 503, media_type="text/plain")
        return StreamingResponse(self._messages(), media_type="text/event-stream")

    async def _messages(self) -> AsyncIterator[bytes]:
        self._open += 1
        self._watcher.enter()
        try:
            turn = 0
            while not self._ending():
                turn, data = self._watcher.message(turn)
                yield b"data: " + data + b"\n\n"
                await self._watcher.next()
        finally:
            self._open -= 1
            self._watcher.leave()


async def worker(request: Request) -> Response:
    """The log and the stacks of a worker. Query: its name, and the number of its process if that is known."""
    name, pid = request.query_params.get("name", ""), request.query_params.get("pid", "")
    shown = await asyncio.to_thread(_worker, name, int(pid) if pid.isdecimal() else 0)
    return JSONResponse(shown)


def _worker(name: str, pid: int) -> dict[str, object]:
    groups = reader.groups(question=Look(log=True))
    group = next((each for each in groups if _has(each, name, pid)), None)
    if group is None:
        return {"name": name, "stacks": f"there is no worker {name!r} here any more", "log": []}
    log = next((report.log for report in group.reports if report.name == name), [])
    return {"name": name, "stacks": _stacks(name, group), "log": log}


def _has(group: SeenGroup, name: str, pid: int) -> bool:
    known = [(each.name, each.pid) for each in group.reports] + [(each.name, each.pid) for each in group.unseen]
    return (name, pid) in known


def _stacks(name: str, group: SeenGroup) -> str:
    """Of that group's worker: another group here may have one of its name."""
    process = reader.process_of(name, group)
    try:
        if process is None:
            return outside.stacks(name)
        answer = reader.ask(process, Stacks())
        return answer.text if isinstance(answer, Text) else str(answer)
    except CannotLook as error:
        seen = outside.Outside() if process is None else outside.look(process)
        by = f"the stacks of its threads, by {seen.by}, innermost line first:\n\n{seen.text}" if seen.threads else ""
        return f"{error}\n\n{by}"


# --- the server -------------------------------------------------------------------------------------------------------


async def serve(listening: Socket, token: str, name: str | None = None) -> None:
    """Serve the page at a socket until a signal ends the process. name: of a worker of the groups that it shows."""
    watcher = Watcher(name)
    app = application(watcher, token, lambda: server.should_exit)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http="h11",
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
    )
    watching = asyncio.create_task(watcher.run())
    try:
        await server.serve(sockets=[listening])
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
