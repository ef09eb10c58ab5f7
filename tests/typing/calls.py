"""Cases of the verbs that run a function. A line with ``type: ignore`` has an error, which both checkers have to see.

Nothing here runs: `test_types` has mypy and pyright look at it. A comment that hides no error is an error to them.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=error

from __future__ import annotations

from typing import Any, assert_type

import torch

import aiorpc as rpc

from .functions import (
    Model,
    acted,
    add,
    count,
    doubled,
    fetch,
    later,
    lines,
    name,
    nothing,
    pair,
    relayed,
    same,
    total,
)


async def call(model: Model, x: torch.Tensor, anything: Any) -> None:
    """`call`, with arguments behind the function."""
    assert_type(rpc.call("w", add, 1), rpc.Future[int])
    assert_type(await rpc.call("w", add, 1, b=2, note="n"), int)
    assert_type(await rpc.call(0, pair, 1, "b"), tuple[int, str])
    assert_type(rpc.call("w", name).wait(), str)
    assert_type(rpc.call("w", name).value(), str)
    assert_type(rpc.call("w", nothing), rpc.Future[None])
    assert_type(await rpc.call("w", fetch, "k"), bytes)
    assert_type(await rpc.call("w", later, 1), float)
    assert_type(await rpc.call("w", relayed, "v", 1), int)
    assert_type(await rpc.call("w", doubled, 1), float)
    assert_type(await rpc.call("w", acted, x), torch.Tensor)
    assert_type(await rpc.call("w", same, 1), int)
    assert_type(await rpc.call("w", Model, 3, bias=False), Model)
    assert_type(await rpc.call("w", model.score, x), float)
    assert_type(await rpc.call("w", model.load, "p"), int)
    assert_type(await rpc.call("w", Model.load, model, "p"), int)
    assert_type(await rpc.call("w", torch.add, x, x), torch.Tensor)
    assert_type(await rpc.call("w", torch.ones, 2, 3), torch.Tensor)
    assert_type(await rpc.call("w", lambda: 3), int)
    assert_type(await rpc.call("w", anything, 1, key=2), Any)
    assert_type(await rpc.call("w", total, [1, 2.5]), float)
    assert_type(rpc.call("w", add, 1).then(lambda future: str(future.value())), rpc.Future[str])

    rpc.call("w", add, "1")  # type: ignore
    rpc.call("w", add)  # type: ignore
    rpc.call("w", add, 1, c=2)  # type: ignore
    rpc.call("w", pair, "b", 1)  # type: ignore
    rpc.call("w", name, 1)  # type: ignore
    rpc.call("w", fetch, 1)  # type: ignore
    rpc.call("w", later, "1")  # type: ignore
    rpc.call("w", Model, "3")  # type: ignore
    rpc.call("w", model.load, 1)  # type: ignore
    rpc.call("w", add(1))  # type: ignore
    rpc.call("w", "add", 1)  # type: ignore
    rpc.call(add, 1)  # type: ignore
    rpc.call(None, add, 1)  # type: ignore
    await rpc.call("w", add, 1) + "1"  # type: ignore
    rpc.call("w", add, 1) + 1  # type: ignore
    rpc.call("w", add, 1, timeout=3)  # type: ignore


def rpc_sync(model: Model, x: torch.Tensor, keywords: dict[str, Any], anything: Any) -> None:
    """`rpc_sync`, with a tuple of arguments."""
    assert_type(rpc.rpc_sync("w", add, args=(1,)), int)
    assert_type(rpc.rpc_sync("w", add, args=(1, 2), timeout=3), int)
    assert_type(rpc.rpc_sync("w", add, (1, 2)), int)
    assert_type(rpc.rpc_sync("w", add, args=(1,), kwargs={"note": "n"}), int)
    assert_type(rpc.rpc_sync("w", add, (1,), {"note": "n"}, 3.0), int)
    assert_type(rpc.rpc_sync("w", add, kwargs=keywords), int)
    assert_type(rpc.rpc_sync("w", name), str)
    assert_type(rpc.rpc_sync("w", name, args=()), str)
    assert_type(rpc.rpc_sync("w", name, timeout=3), str)
    assert_type(rpc.rpc_sync("w", fetch, args=("k",)), bytes)
    assert_type(rpc.rpc_sync("w", fetch, kwargs={"key": "k"}), bytes)
    assert_type(rpc.rpc_sync("w", later, args=(1,)), float)
    assert_type(rpc.rpc_sync("w", doubled, args=(1,)), float)
    assert_type(rpc.rpc_sync("w", Model, args=(3,)), Model)
    assert_type(rpc.rpc_sync("w", Model.score, args=(model, x)), float)
    assert_type(rpc.rpc_sync("w", torch.add, args=(x, 1)), torch.Tensor)
    assert_type(rpc.rpc_sync("w", anything, args=(x, 1)), Any)

    rpc.rpc_sync("w", add, args=("1",))  # type: ignore
    rpc.rpc_sync("w", pair, args=(1,))  # type: ignore
    rpc.rpc_sync("w", pair)  # type: ignore
    rpc.rpc_sync("w", name, args=(1,))  # type: ignore
    rpc.rpc_sync("w", fetch, args=(1,))  # type: ignore
    rpc.rpc_sync("w", later, args=("1",))  # type: ignore
    rpc.rpc_sync("w", add, args=1)  # type: ignore
    rpc.rpc_sync("w", add, 1)  # type: ignore
    rpc.rpc_sync("w", add, args=(1,), kwargs=3)  # type: ignore
    rpc.rpc_sync("w", 3)  # type: ignore


async def rpc_async(x: torch.Tensor, keywords: dict[str, Any]) -> None:
    """`rpc_async`, with a tuple of arguments."""
    assert_type(rpc.rpc_async("w", add, args=(1,)), rpc.Future[int])
    assert_type(await rpc.rpc_async("w", fetch, args=("k",)), bytes)
    assert_type(rpc.rpc_async("w", later, args=(1,)).wait(), float)
    assert_type(rpc.rpc_async("w", doubled, args=(1,)), rpc.Future[float])
    assert_type(rpc.rpc_async("w", add, args=(1,), kwargs=keywords), rpc.Future[int])
    assert_type(rpc.rpc_async("w", name), rpc.Future[str])
    assert_type(rpc.wait_all([rpc.rpc_async("w", name)]), list[str])
    assert_type(await rpc.collect_all([rpc.rpc_async("w", name)]), list[rpc.Future[str]])

    rpc.rpc_async("w", add, args=("1",))  # type: ignore
    rpc.rpc_async("w", pair)  # type: ignore
    rpc.rpc_async("w", fetch, args=(1,))  # type: ignore


async def remote(model: Model, x: torch.Tensor) -> None:
    """`remote`, in both of its forms, and what its references give."""
    ref = rpc.remote("w", Model, 3, bias=False)
    assert_type(ref, rpc.RRef[Model])
    assert_type(await ref, Model)
    assert_type(ref.to_here(), Model)
    assert_type(ref.local_value(), Model)
    assert_type(rpc.remote("w", fetch, "k"), rpc.RRef[bytes])
    assert_type(rpc.remote("w", later, 1), rpc.RRef[float])
    assert_type(rpc.remote("w", doubled, 1), rpc.RRef[float])
    assert_type(rpc.remote("w", add, args=(1,)), rpc.RRef[int])
    assert_type(rpc.remote("w", add, args=(1,), kwargs={"note": "n"}, timeout=3), rpc.RRef[int])
    assert_type(rpc.remote("w", fetch, args=("k",)), rpc.RRef[bytes])
    assert_type(rpc.remote("w", name, timeout=3), rpc.RRef[str])
    assert_type(rpc.RRef(model), rpc.RRef[Model])
    assert_type(ref.rpc_sync().score(x), Any)
    assert_type(ref.rpc_async().score(x), rpc.Future[Any])
    assert_type(ref.rpc_async(timeout=3)(x), rpc.Future[Any])
    assert_type(ref.remote().score(x), rpc.RRef[Any])
    async for item in ref.stream().items():
        assert_type(item, Any)

    rpc.remote("w", Model, "3")  # type: ignore
    rpc.remote("w", add)  # type: ignore
    rpc.remote("w", add, args=("1",))  # type: ignore
    rpc.remote("w", fetch, 1)  # type: ignore
    (await ref).scores(x)  # type: ignore
    ref.score(x)  # type: ignore
    ref.rpc_async().score(x) + 1  # type: ignore


async def stream() -> None:
    """`stream`, of generators and of asynchronous ones."""
    assert_type([item async for item in rpc.stream("w", count, 3)], list[int])
    assert_type([item async for item in rpc.stream("w", lines, "p")], list[str])
    for item in rpc.stream("w", count, limit=3):
        assert_type(item, int)
    async with rpc.stream("w", lines, "p") as opened:
        assert_type(await anext(opened), str)

    rpc.stream("w", count, "3")  # type: ignore
    rpc.stream("w", lines)  # type: ignore
    rpc.stream("w", add, 1)  # type: ignore
    rpc.stream("w", fetch, "k")  # type: ignore
    await rpc.stream("w", count, 3)  # type: ignore


async def builtins() -> None:
    """Functions of others, which are written with many signatures."""
    assert_type(await rpc.call("w", len, [1]), int)
    assert_type(await rpc.call("w", int, "1"), int)
