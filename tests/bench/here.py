"""An RPC module that has nothing remote about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Here:
    """Runs calls where they are made. spoil: what to make of an answer. calls: each function, and bytes of tensors."""

    TensorPipeRpcBackendOptions: Any = None
    init_rpc: Any = None
    shutdown: Any = None
    rpc_async: Any = None

    def __init__(self, spoil: Callable[[Any], Any] = lambda answer: answer) -> None:
        self.calls: list[tuple[Callable[..., Any], int]] = []
        self._spoil = spoil

    def rpc_sync(self, to: str, func: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
        self.calls.append((func, sum(each.nbytes for each in args if isinstance(each, torch.Tensor))))
        return self._spoil(func(*args))

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """What was called, in that order."""
        return [function for function, _ in self.calls]


def one_element_wrong(answer: Any) -> Any:
    """A tensor that differs from the answer; the answer if it is none."""
    return answer.index_fill(0, torch.tensor([7]), -1.0) if isinstance(answer, torch.Tensor) else answer
