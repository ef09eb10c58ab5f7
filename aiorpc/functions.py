"""Decorators for handlers, under the name that torch gives their module."""

from .runtime.batching import batched
from .runtime.functions import async_execution

__all__ = ["async_execution", "batched"]
