"""Handlers that need torch's own decorator."""

from __future__ import annotations

import torch
from torch.distributed.rpc.functions import async_execution

from .functions import new_held


@async_execution  # type: ignore[untyped-decorator]  # torch's has no types
def hold() -> torch.futures.Future[None]:
    """Answer only when ``release_held`` completes the future."""
    return new_held(torch.futures.Future())
