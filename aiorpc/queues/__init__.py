"""Queues that one worker owns and all workers put into and get from: see `aiorpc.Queue`.

Built on named objects, calls and references, above the runtime. `served` is the queue at its owner, and `tickets` how
that knows again what it has given; `client` is one worker's side of it, and `calls` what that calls; `waiting` has the
Futures of those who wait. `packing` and `items` are for items on their way, and `handle` has what programs use.
"""

from __future__ import annotations

from .handle import Queue, QueueHandle

__all__ = ["Queue", "QueueHandle"]
