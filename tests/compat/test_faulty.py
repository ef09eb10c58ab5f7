"""torch's options for injecting faults, over aiorpc's own: which messages they mean."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

import aiorpc
from aiorpc.compat.torch.faulty import FaultyTensorPipeRpcBackendOptions, inject
from aiorpc.testing import Faults, cluster

Workers = list[aiorpc.Worker]
ONE = torch.ones(1)


def triple(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 3


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    async with cluster(2) as workers:
        yield workers


def options(*fail: str, sends: int = 3, **delay: float) -> FaultyTensorPipeRpcBackendOptions:
    return FaultyTensorPipeRpcBackendOptions(messages_to_fail=list(fail), messages_to_delay=delay, num_fail_sends=sends)


@pytest.mark.parametrize(("kind", "fails"), [("PYTHON_CALL", triple), ("SCRIPT_CALL", torch.neg)])
async def test_operators_are_told_from_functions(workers: Workers, kind: str, fails: object) -> None:
    """SCRIPT types are operators of torch, PYTHON types everything else; each attempt fails."""
    with Faults(workers[0]) as faults:
        inject(faults, options(kind))
        for function in (triple, torch.neg) * 2:
            call = workers[0].call("worker1", function, ONE)
            if function is fails:
                with pytest.raises(aiorpc.RpcError, match="made to fail"):
                    await call
            else:
                assert (await call).shape == (1,)


async def test_fetching_is_of_the_type_of_the_creation(workers: Workers) -> None:
    """The value that an operator made is fetched by another type of message than that of a function."""
    with Faults(workers[0]) as faults:
        inject(faults, options(SCRIPT_RREF_FETCH_CALL=60.0))
        assert await workers[0].remote("worker1", triple, ONE) == 3
        late = asyncio.ensure_future(_fetch(workers[0].remote("worker1", torch.neg, ONE)))
        assert await workers[0].call("worker1", triple, ONE) == 3
        assert not late.done()
    assert await late == -1


async def _fetch(rref: aiorpc.RRef[torch.Tensor]) -> torch.Tensor:
    return await rref


async def test_what_torch_would_send_again_arrives_late(workers: Workers) -> None:
    """Messages of reference counting are delayed, not lost, and the worker leaves after them."""
    with Faults(workers[0]) as faults:
        inject(faults, options("RREF_USER_DELETE", sends=1))
        assert await workers[0].remote("worker1", triple, ONE) == 3
        reports = await asyncio.gather(*(worker.shutdown() for worker in workers))
    assert [report.references for report in reports] == [(), ()]


def test_a_type_that_does_not_exist_is_refused() -> None:
    """A misspelt type would test nothing."""
    with pytest.raises(ValueError, match="No mapping to rpc::MessageType exists for string PYTHON_CAL"):
        options("PYTHON_CAL")
