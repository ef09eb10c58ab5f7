"""Gradients across workers, with the names of ``torch.distributed.autograd``.

    with autograd.context() as context_id:                    # async with ... as ctx, in coroutines
        loss = criterion(rpc.rpc_sync("stage1", forward, args=(x,)), y)
        autograd.backward(context_id, [loss])                 # await ctx.backward([loss])
        gradients = autograd.get_gradients(context_id)

Gradients add up in the context and nothing is written to ``.grad``; `aiorpc.optim.DistributedOptimizer` takes them from
there. `passes` describes how a pass goes through the graphs of several workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..runtime.node import registry
from .contexts import Context, context, make_pass

__all__ = ["Context", "backward", "context", "get_gradients"]


def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """Compute the gradients of the sum of `roots` for all leaves that they depend on, on all workers; blocks.

    context_id: of a context that is open here. roots: scalars of this worker, computed in the context, on any device.
    retain_graph: keep the graph, for another pass. Gradients are added to those that the context has, at the worker of
    each leaf. Parts of the graph that the roots do not depend on are left alone, and no worker waits for them.

    As with torch's own ``backward``, a leaf that was frozen since the forward pass (``requires_grad_(False)``) gets no
    gradient. A leaf that has changed its type or device since gets a gradient of the former type on the former device.
    Raises RpcUsageError for invalid roots or an unknown context; the error of a node of the graph, with notes of its
    worker; PeerLost if a worker that takes part is lost; RpcTimeout after the worker's ``rpc_timeout``. After an error
    part of the gradients may be there. From any thread but the loop's, where ``await ctx.backward(roots)`` does the
    same. The pass itself runs in threads, never on a loop.
    """
    (registry.only or registry.get()).engine.refuse_on_loop("autograd.backward()", "await ctx.backward(roots)")
    make_pass(context_id, roots, retain_graph).drive()


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients that a context has at this worker so far: a new dict from leaf to gradient, of the leaf's shape.

    RpcUsageError if there is no such context here. Any thread.
    """
    return registry.get().gradients.get(context_id).gradients()
