"""Handlers that need aiorpc's own decorator."""

from __future__ import annotations

import torch

import aiorpc

from .functions import new_held


@aiorpc.async_execution
def hold() -> torch.futures.Future[None]:
    """Answer only when ``release_held`` completes the future."""
    return new_held(aiorpc.Future())
