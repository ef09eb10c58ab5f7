"""Serve a store where workers meet, which outlives all of them. It ends with SIGINT or SIGTERM.

Whoever reaches it can read and write what the workers leave there: no secret, but enough to keep a group from forming.
Give the workers AIORPC_SECRET or tls wherever others may reach it.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading

from ..errors import RendezvousError
from ..runtime.meeting.stores import serve

SUMMARY = "serve a store where workers meet, which outlives all of them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--port", type=int, required=True, help="where to listen; 0 for any free port")
    parser.add_argument(
        "--host", default="127.0.0.1", help="the local address to listen on (127.0.0.1); 0.0.0.0 or :: for all of them"
    )


def run(options: argparse.Namespace) -> int:
    """Serve until a signal comes; 1 if the address cannot be had."""
    ended = threading.Event()
    before = {number: signal.signal(number, lambda *_: ended.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        store, port = serve(options.host, options.port)
        host = f"[{options.host}]" if ":" in options.host else options.host
        print(f"tcp://{host}:{port}", flush=True)
        ended.wait()
        del store  # its server ends with it
    except RendezvousError as error:
        print(f"python -m aiorpc store: {error}", file=sys.stderr)
        return 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0
