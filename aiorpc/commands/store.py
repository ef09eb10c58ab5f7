"""Serve a store where workers meet, which outlives all of them. It ends with SIGINT or SIGTERM.

A process that reaches it can read and write what the workers leave there: no secret, but enough to keep a group from
forming.
Give the workers AIORPC_SECRET or tls wherever others may reach it.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from dataclasses import replace
from functools import partial

from ..errors import RendezvousError
from ..runtime.meeting.meeting_place import MeetingPlace, is_loopback, local_address
from ..runtime.meeting.stores import serve

_ALL = ("0.0.0.0", "::")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--port", type=int, required=True, help="where to listen; 0 for any free port")
    parser.add_argument(
        "--host", default="127.0.0.1", help="the local address to listen on (127.0.0.1); 0.0.0.0 or :: for all of them"
    )


def run(options: argparse.Namespace) -> int:
    """Serve until a signal comes. Returns 1 if the address cannot be bound."""
    # Not a threading.Event: the handler may interrupt a thread that holds its lock.
    ended = os.eventfd(0, os.EFD_CLOEXEC)
    handler = partial(_write_on_signal, ended)
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if not options.host:
            raise RendezvousError("cannot listen at '': name an address, 0.0.0.0 or :: for all of them")
        store, port = serve(options.host, options.port)
        print(_where(options.host, port), flush=True)
        os.read(ended, 8)  # goes on after a signal, which os.eventfd_read does not
        del store  # its server ends with it
    except RendezvousError as error:
        print(f"python -m aiorpc store: {error}", file=sys.stderr)
        return 1
    finally:
        for number, old in before.items():
            signal.signal(number, old)
        os.close(ended)
    return 0


def _where(host: str, port: int) -> MeetingPlace:
    """What workers give as init_method: where all addresses are meant, one of this host, as others can reach that."""
    place = MeetingPlace(None, None, host=host, port=port)
    if host not in _ALL:
        return place
    # Without a route to the rest of the world the name of this host leads to an address, if it has one.
    found = [replace(place, host=local_address(replace(place, host=name))) for name in (host, socket.gethostname())]
    return next((each for each in found if not is_loopback(each)), found[0])


def _write_on_signal(descriptor: int, *_: object) -> None:
    os.eventfd_write(descriptor, 1)
