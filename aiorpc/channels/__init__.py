"""Channels: how the bytes of tensors get from one worker to another. A channel knows nothing of calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..protocol.frames import Buffer


class Channel(Protocol):
    """Moves the tensors of one message.

    `put` borrows the tensors until the frame was written (or copies them if told so); `take` hands out tensors that
    belong to the receiver alone. `table` is plain data for the message body, `segments` travel behind it.
    """

    def put(self, tensors: Sequence[torch.Tensor], *, copy: bool) -> tuple[list[Any], list[Buffer]]: ...

    def take(self, table: list[Any], segments: Sequence[Buffer]) -> list[torch.Tensor]: ...
