"""Queues that one worker owns and all workers put into and get from: see `aiorpc.Queue`.

Built on named objects, calls and references, above the runtime. `served` is the queue at its owner; `tickets` lets the
owner recognize items that it has given. `client` is one worker's side of a queue, `calls` the calls that it makes,
`waiting` the Futures of `put` and `get`. `packing` and `items` are for items on their way. `handle` has the public
classes.
"""

from __future__ import annotations

from .handle import Queue, QueueHandle

__all__ = ["Queue", "QueueHandle"]
