"""Decorators for handlers, under the name that torch gives their module."""

from .runtime.calls.batched import batched
from .runtime.calls.functions import async_execution

__all__ = ["async_execution", "batched"]
