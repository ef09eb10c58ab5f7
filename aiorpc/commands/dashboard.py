"""Serve a page that shows the groups of this user on this host: workers, traffic, calls, queues, weights, who waits.

It runs in a process of its own, joins no group, and changes nothing. Other hosts can open the page only if a token is
set.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import os
import socket
import stat
import sys
from pathlib import Path

from ..private import exposure

PORT = 8265
_LEAST_TOKEN, _MOST_TOKEN = 16, 4096


class Refusal(Exception):
    """It cannot be served. Its text is for the user."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("name", nargs="?", help="a worker of the group that is meant; all groups without one")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=PORT, help=f"the port; 0 for any free one ({PORT})")
    parser.add_argument("--token-file", metavar="FILE", help="a file with the token that browsers have to show")


def run(options: argparse.Namespace) -> int:
    """Serve until a signal ends it. Returns 1 if it cannot be served."""
    try:
        try:
            from ..observability.dashboard import serving
        except ImportError as error:
            raise Refusal(f"it needs starlette and uvicorn ({error}): pip install 'aiorpc-torch[dashboard]'") from error
        token = "" if options.token_file is None else read_token(Path(options.token_file))
        listening = listen(options.host, options.port, token)
    except Refusal as error:
        print(f"python -m aiorpc dashboard: {error}", file=sys.stderr)
        return 1
    with listening:
        host, port = listening.getsockname()[:2]
        print(f"http://{f'[{host}]' if ':' in host else host}:{port}/", flush=True)
        asyncio.run(serving.serve(listening, token, options.name))
    return 0


def listen(host: str, port: int, token: str) -> socket.socket:
    """A socket that listens. Refusal if it cannot be had, or if other hosts could open the page without a token."""
    if not 0 <= port < 65_536:
        raise Refusal(f"--port takes a number up to 65535, not {port}")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise Refusal(f"the host {host!r} is not known here: {error}") from error
    if not token and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise Refusal(
            f"other hosts can open the page at {host!r}, and would see stacks and logs of workers: put a token into a "
            "file and add --token-file FILE; or leave --host out, and reach the page by `ssh -L`"
        )
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise Refusal(
            f"it cannot listen at {host} port {port}: {error.strerror}. --port 0 takes any free one"
        ) from error
    return listening


def read_token(path: Path) -> str:
    """The token in a file that is private to this user. Refusal if there is none."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            exposed = exposure(status)
            if not stat.S_ISREG(status.st_mode):
                raise Refusal(f"--token-file: {path} is no file")
            if exposed is not None:
                raise Refusal(f"--token-file: others than this user can read or write {path} {exposed}")
            token = file.read(_MOST_TOKEN).strip()
    except OSError as error:
        raise Refusal(f"--token-file: {path} cannot be read: {error.strerror}") from error
    if len(token) < _LEAST_TOKEN or not all(0x21 <= each < 0x7F and each not in b'",;\\' for each in token):
        raise Refusal(
            f"--token-file: the token in {path} must have at least {_LEAST_TOKEN} characters, all of ASCII, without "
            "spaces and \",;\\; such as `python -c 'import secrets; print(secrets.token_urlsafe())'` prints"
        )
    return token.decode()
