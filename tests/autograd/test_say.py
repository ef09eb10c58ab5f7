"""Who has a say in a context and in its passes, and how much a worker keeps for others in them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch

from aiorpc import NotAllowed, Overloaded, RpcBackendOptions, RpcError, RpcUsageError, Worker, autograd
from aiorpc.autograd.brought import brought_by
from aiorpc.autograd.contexts import forget, has_ended
from aiorpc.autograd.parts import abort, gather, go_on, plan, take
from aiorpc.autograd.wire import Given, Sparse, from_wire, pack_names, to_wire, unpack_names, unpack_reference
from aiorpc.errors import ProtocolError
from aiorpc.protocol.messages import Recorded
from aiorpc.runtime.gradients.contexts import AutogradContext
from aiorpc.runtime.gradients.reach import SentName
from aiorpc.testing import cluster
from tests.autograd import parts
from tests.autograd.parts import SIZE, Tensor, check, expected, gradients_of, outside, step, vector, weight_of
from tests.runtime.waiting import until
from tests.scripts import make_current

double = torch.float64


def sent_by(worker: Worker, ctx: int) -> list[SentName]:
    """What that worker has sent in a context."""
    return list(worker._node.gradients.get(ctx).sent)


def context_of(worker: Worker, ctx: int) -> AutogradContext:
    """A context, as that worker sees it."""
    return worker._node.gradients.get(ctx)


# --- who has a say ----------------------------------------------------------------------------------------------------


def asked(handler: Any, ctx: int, number: int, names: Sequence[SentName]) -> tuple[Any, ...]:
    """Arguments with which a worker would change the gradients of these tensors, or end the pass."""
    given = to_wire(dict.fromkeys(names, torch.full((SIZE,), 1000.0, dtype=double)))
    if handler is plan:
        return ctx, number, pack_names(names), False, 5.0, b"", *given
    if handler is gather:
        return ctx, pack_names(names)
    if handler is abort:
        return ctx, number, pack_names(names), "it shall fail"
    return ctx, number, *given


@pytest.mark.parametrize("handler", [plan, go_on, take, abort, gather])
async def test_who_takes_no_part_has_no_say(workers: list[Worker], handler: Any) -> None:
    """Though it knows the context, and a pass of its own or of another worker; nothing of it is kept."""
    x, w = vector(), weight_of(workers[1], 0)
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.layer, x)
        for number in (workers[2]._node.gradients.new_id(), workers[0]._node.gradients.new_id()):
            for to in ("worker0", "worker1"):
                with pytest.raises(RpcError):
                    await outside(workers[2].call, to, handler, *asked(handler, int(ctx), number, [SentName(1, 0)]))
        for worker in workers[:2]:
            assert not context_of(worker, ctx).parts and not context_of(worker, ctx).passed
        await ctx.backward([y.sum()])
        of_x, of_w = expected(step(x, w).sum(), [x, w])
        check(gradients_of(workers[0], ctx), [(x, of_x)])
        check(gradients_of(workers[1], ctx), [(w, of_w)])


@pytest.mark.parametrize("handler", [plan, go_on, take])
@pytest.mark.parametrize("takes_part", [True, False])
async def test_gradients_along_edges_of_others_are_refused(
    workers: list[Worker], handler: Any, takes_part: bool
) -> None:
    """Though the worker takes part itself, or knows the name of the tensor; nothing of it is used."""
    x, w = vector(), weight_of(workers[1], 0)
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.layer, x)
        names = sent_by(workers[1], ctx)
        if takes_part:
            await workers[0].call("worker2", parts.via, vector(), "worker1")
        number = workers[2]._node.gradients.new_id()
        with pytest.raises(NotAllowed if takes_part or handler is plan else RpcUsageError):
            await outside(workers[2].call, "worker1", handler, *asked(handler, int(ctx), number, names))
        assert not context_of(workers[1], ctx).parts
        await ctx.backward([y.sum()])
        of_x, of_w = expected(step(x, w).sum(), [x, w])
        check(gradients_of(workers[0], ctx), [(x, of_x)])
        check(gradients_of(workers[1], ctx), [(w, of_w)])


async def test_an_answer_brings_gradients_of_its_own_edges_alone(workers: list[Worker]) -> None:
    """What a worker answers in a pass is looked at as what it brings by itself."""
    x = vector()
    async with autograd.context() as ctx:
        await workers[0].call("worker1", parts.layer, x)
        await workers[0].call("worker2", parts.layer, x)
        context, (first, second) = context_of(workers[0], ctx), sent_by(workers[0], ctx)
        peer = workers[0]._node.peers.find("worker2")
        packed, *tensors = to_wire({second: vector().detach()})
        assert second in brought_by(workers[0]._node, context, peer, packed, tensors).gradients
        for gradients in ({first: vector().detach()}, {second: vector().detach(), first: None}):
            packed, *tensors = to_wire(gradients)
            with pytest.raises(NotAllowed, match=r"'worker2' has given .* that it was not sent"):
                brought_by(workers[0]._node, context, peer, packed, tensors)


async def test_a_gradient_has_the_shape_of_its_tensor(workers: list[Worker]) -> None:
    """Another one is refused, also one that torch would expand or add up."""
    async with autograd.context() as ctx:
        await workers[0].call("worker1", parts.layer, vector())
        (name,) = sent_by(workers[0], ctx)
        peer = workers[0]._node.peers.find("worker1")
        for shape in ((), (1,), (SIZE + 1,), (1000, SIZE)):
            packed, *tensors = to_wire({name: torch.ones(shape, dtype=double)})
            with pytest.raises(NotAllowed, match="of another shape"):
                brought_by(workers[0]._node, context_of(workers[0], ctx), peer, packed, tensors)


def backward_of(context_id: int, y: Tensor) -> None:
    """Handler: a pass from what was sent here."""
    autograd.backward(context_id, [(y * y).sum()])


@pytest.mark.parametrize("most_behind", [512, -1])
async def test_a_worker_runs_a_pass_through_one_that_it_never_met(workers: list[Worker], most_behind: int) -> None:
    """It knows of its tensors by what came of them. The error of such a pass is heard there, too."""
    x, w = vector(), weight_of(workers[1], 0)
    for worker in workers:
        worker._node.gradients.most_behind = most_behind
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.layer, x)
        await workers[0].call("worker2", backward_of, int(ctx), y * 2)
        assert not context_of(workers[1], ctx).takes_part(workers[2].id)
        of_x, of_w = expected((2 * step(x, w)).pow(2).sum(), [x, w])
        check(gradients_of(workers[0], ctx), [(x, of_x)])
        check(gradients_of(workers[1], ctx), [(w, of_w)])
    w.register_hook(lambda _: 1 / 0)
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.layer, vector())
        with pytest.raises(ZeroDivisionError):
            await workers[0].call("worker2", backward_of, int(ctx), y * 2)
        await until(lambda: not any(context_of(worker, ctx).parts for worker in workers))
    w._backward_hooks.clear()  # type: ignore[union-attr]  # there is one


async def test_a_pass_that_this_worker_runs_is_made_by_itself_alone(workers: list[Worker]) -> None:
    """Who brings gradients for one that has ended, or never was, makes none."""
    async with autograd.context() as ctx:
        await workers[0].call("worker1", parts.layer, vector())
        number = workers[0]._node.gradients.new_id()
        with pytest.raises(RpcError, match="has ended"):
            await outside(workers[1].call, "worker0", take, int(ctx), number, *to_wire({}))
        assert not context_of(workers[0], ctx).parts


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
async def test_random_words_of_a_worker_that_takes_no_part_change_nothing(four: list[Worker], seed: int) -> None:
    """Real and invented contexts, passes and names: the gradients of the others stay exact."""
    chance, bad, stop = random.Random(seed), four[3], False
    real: list[int] = []

    async def disturb() -> int:
        count = 0
        while not stop:
            handler = chance.choice([plan, go_on, take, abort, gather, forget, has_ended])
            known = [each for worker in four[:3] for each in worker._node.gradients._contexts.values()]
            context = chance.choice(known) if known and chance.random() < 0.8 else None
            id = bad._node.gradients.new_id() if context is None else context.id
            names = [SentName(chance.getrandbits(62), 0)]
            numbers = [bad._node.gradients.new_id(), four[0]._node.gradients.new_id(), *real]
            if context is not None:
                numbers += [*context.parts, *context.passed]
                if handler in (take, go_on) and context.sent:
                    names = [chance.choice([*context.sent])]
            number = chance.choice(numbers)
            arguments = (id,) if handler in (forget, has_ended) else asked(handler, id, number, names)
            with contextlib.suppress(RpcError):
                await outside(bad.call, f"worker{chance.randrange(3)}", handler, *arguments)
            count += 1
        return count

    disturbing = asyncio.ensure_future(disturb())
    w1, w2 = weight_of(four[1], 0), weight_of(four[2], 0)
    for _ in range(60):
        x = vector(chance.randrange(1000))
        async with autograd.context() as ctx:
            y = await four[0].call("worker1", parts.via, x, "worker2")
            await ctx.backward([y.sum()])
            real.append(int(ctx))
            of_x, of_1, of_2 = expected(step(step(step(x, w1), w2), w1).sum(), [x, w1, w2])
            check(gradients_of(four[0], ctx), [(x, of_x)])
            check(gradients_of(four[1], ctx), [(w1, of_1)])
            check(gradients_of(four[2], ctx), [(w2, of_2)])
    stop = True
    assert await disturbing > 50


# --- what is kept for others ------------------------------------------------------------------------------------------


async def test_passes_of_one_worker_are_bounded() -> None:
    """Of passes under way, and of those that are remembered; what it has begun is gone with the context."""
    options = [RpcBackendOptions(), RpcBackendOptions(max_references=20)]
    async with cluster(2, options=options) as workers:
        make_current(workers[0])
        async with autograd.context() as ctx:
            await workers[0].call("worker1", parts.layer, vector())
            with pytest.raises(Overloaded, match="max_references"):
                for _ in range(30):
                    number = workers[0]._node.gradients.new_id()
                    await outside(workers[0].call, "worker1", take, int(ctx), number, *to_wire({}))
            assert len(context_of(workers[1], ctx).parts) < 20
        await until(lambda: not len(workers[1]._node.gradients))
        for _ in range(30):  # honest ones
            async with autograd.context() as ctx:
                y = await workers[0].call("worker1", parts.layer, vector())
                await ctx.backward([y.sum()])


async def test_tensors_that_are_recorded_for_one_worker_are_bounded() -> None:
    """In its calls, in answers to it and in items; more of them end its call, and leaving the context makes room."""
    options = [RpcBackendOptions(), RpcBackendOptions(max_references=20)]
    async with cluster(2, options=options) as workers:
        make_current(workers[0])
        for verb in (_by_calls, _by_items):
            async with autograd.context():
                with pytest.raises(Overloaded, match="max_references"):
                    await verb(workers[0])
            await until(lambda: not len(workers[1]._node.gradients))


async def _by_calls(worker: Worker) -> None:
    for _ in range(30):
        await worker.call("worker1", parts.layer, vector())


def many(x: Tensor) -> Any:
    """Handler: a long stream of tensors with a past."""
    for _ in range(30):
        yield x * 2


async def _by_items(worker: Worker) -> None:
    async for _ in worker.stream("worker1", many, vector()):
        pass


async def test_gradients_that_wait_are_bounded() -> None:
    """More than max_queued_bytes of one worker end its passes; one message alone may have any length."""
    options = [RpcBackendOptions(), RpcBackendOptions(max_queued_bytes=100_000)]
    async with cluster(2, options=options) as workers:
        make_current(workers[0])
        x = torch.ones(10_000, dtype=double, requires_grad=True)
        kept = workers[1]._node.gradients.kept
        async with autograd.context() as ctx:
            y = await workers[0].call("worker1", torch.mul, torch.ones(1, dtype=double, requires_grad=True), 2)
            z = await workers[0].call("worker1", torch.sum, x)
            names = sent_by(workers[1], ctx)

            def give(name: SentName, shape: tuple[int, ...]) -> Any:
                number = workers[0]._node.gradients.new_id()
                given = to_wire({name: torch.ones(shape, dtype=double)})
                return outside(workers[0].call, "worker1", take, int(ctx), number, *given)

            for _ in range(10):
                await give(names[0], (1,))
            assert kept._waiting == {workers[1]._node.peers.find("worker0"): 80}
            await ctx.backward([y.sum() + z])
        await until(lambda: not len(workers[1]._node.gradients))
        assert not kept._waiting and not kept._pieces and not kept._leaf_bytes
        async with autograd.context() as ctx:
            await workers[0].call("worker1", large, x)
            (name,) = sent_by(workers[1], ctx)
            for at in range(3):
                given = to_wire({name: torch.ones(10_000, dtype=double)})
                call = outside(workers[0].call, "worker1", take, int(ctx), workers[0]._node.gradients.new_id(), *given)
                if at == 0:
                    await call
                else:
                    with pytest.raises(Overloaded, match="max_queued_bytes"):
                        await call
        await until(lambda: not len(workers[1]._node.gradients))
        assert not kept._waiting


def large(x: Tensor) -> Tensor:
    """Handler."""
    return x * 2


async def test_gradients_of_leaves_in_many_contexts_of_one_worker_are_bounded() -> None:
    """Those of one context are let in whatever they take; so are those of the next once it was left."""
    size = SIZE * SIZE * 8
    options = [RpcBackendOptions(), RpcBackendOptions(max_incoming_bytes=size + size // 2)]
    async with cluster(2, options=options) as workers:
        make_current(workers[0])
        for k in range(2):
            async with autograd.context() as first:
                y = await workers[0].call("worker1", parts.layer, vector(), k)
                await first.backward([y.sum()])
                async with autograd.context() as second:
                    y = await workers[0].call("worker1", parts.layer, vector(), k)
                    with pytest.raises(Overloaded, match="max_incoming_bytes"):
                        await second.backward([y.sum()])
                y = await workers[0].call("worker1", parts.layer, vector(), k)
                await first.backward([y.sum()])  # adds to what is there
            await until(lambda: not len(workers[1]._node.gradients))
        assert not workers[1]._node.gradients.kept._leaf_bytes


async def test_what_a_message_cannot_say_of_gradients(workers: list[Worker]) -> None:
    """A peer that says it is at fault, and nothing else breaks of it."""
    peer = workers[0]._node.peers.find("worker1")
    async with autograd.context() as ctx:
        await workers[0].call("worker1", parts.weight, 0)
        for said in (
            Recorded(ctx, 1, [0], []),
            Recorded(ctx, 1, [0], [[1]]),
        ):
            with pytest.raises(ProtocolError, match="gradients"):
                workers[0]._node.gradients.receive(peer, said, [vector().detach()])
        tensors, past = workers[0]._node.gradients.receive(
            peer, Recorded(ctx, 1, [1, 2], [[], [1]]), [vector().detach()]
        )
        assert not tensors[0].requires_grad and past is not None
        assert past(0, vector().detach()).grad_fn is not None
        for number in (1, 2):
            with pytest.raises(ProtocolError, match="gradients"):
                past(number, vector().detach())


# --- how gradients travel ---------------------------------------------------------------------------------------------

NAMES = [SentName((1 << 62) + 5, 0), SentName(7, 1), SentName(7, 2), SentName(8, 0)]


def sparse_ones() -> list[Tensor]:
    """A matrix in each layout, one of them not coalesced, one with dense values."""
    dense = torch.eye(4, dtype=double).roll(1)
    twice = torch.sparse_coo_tensor(torch.tensor([[1, 1], [0, 0]]), torch.ones(2, dtype=double), (4, 4))
    return [
        *(dense.to_sparse(layout=layout) for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)),
        *(dense.to_sparse(layout=layout, blocksize=(2, 2)) for layout in (torch.sparse_bsr, torch.sparse_bsc)),
        *(dense.to_sparse(1), twice, torch.zeros(4, 4).to_sparse()),
    ]


@pytest.mark.parametrize("gradient", sparse_ones(), ids=lambda each: f"{each.layout}")
def test_sparse_gradients_travel_as_plain_parts(gradient: Tensor) -> None:
    """Side by side with dense ones and with none; what arrives is the same."""
    gradients = dict(zip(NAMES, [torch.ones(3), gradient, None, torch.zeros(())], strict=True))
    packed, *tensors = to_wire(gradients, 1)
    assert type(packed) is bytes and all(each.layout is torch.strided for each in tensors)
    found, said = from_wire(packed, tensors)
    assert said == 1 and [*found] == NAMES and found[NAMES[2]] is None
    came = found[NAMES[1]]
    assert came is not None and came.layout is gradient.layout and torch.equal(came.to_dense(), gradient.to_dense())
    assert gradient.layout is not torch.sparse_coo or came.is_coalesced() == gradient.is_coalesced()


def coo(indices: Any, values: Tensor, size: list[int], coalesced: bool = False) -> tuple[Any, ...]:
    """One sparse gradient, as it would come."""
    given = Given([1, 0], sparse=[Sparse(0, 0, coalesced, size)])
    return msgspec.msgpack.encode(given), torch.tensor(indices), values


BROKEN: dict[str, tuple[Any, ...]] = {
    "an index beyond the size": coo([[4]], torch.ones(1), [4]),
    "an index below 0": coo([[-1]], torch.ones(1), [4]),
    "one value too many": coo([[0]], torch.ones(2), [4]),
    "not coalesced": coo([[1, 1]], torch.ones(2), [4], True),
    "too large a size": coo([[0], [0]], torch.ones(1), [1 << 62, 1 << 62]),
    "no parts": (msgspec.msgpack.encode(Given([1, 0], sparse=[Sparse(0, 0, False, [4])])),),
    "rows that go on beyond the end": (
        msgspec.msgpack.encode(Given([1, 0], sparse=[Sparse(0, 1, False, [2, 2])])),
        torch.tensor([0, 1, 9]),
        torch.tensor([0]),
        torch.ones(1),
    ),
    "too few tensors": (to_wire(dict.fromkeys(NAMES, torch.ones(1)))[0], torch.ones(1)),
    "too many tensors": (*to_wire({NAMES[0]: None}), torch.ones(1)),
    "half of a name": (msgspec.msgpack.encode(Given([1])),),
    "a number below 0": (msgspec.msgpack.encode(Given([-1, 0])), torch.ones(1)),
    "a number too large": (msgspec.msgpack.encode(Given([1 << 63, 0])), torch.ones(1)),
    "another word": (msgspec.msgpack.encode(Given([], state=9)),),
    "a tree": (msgspec.msgpack.encode({"names": []}),),
    "one field more": (msgspec.msgpack.encode([[], 0, [], [], 1]),),
    "no bytes": ("x",),
    "something else": (b"\xc1",),
    "no tensor": (to_wire({NAMES[0]: torch.ones(1)})[0], [1.0]),
    "a sparse tensor": (to_wire({NAMES[0]: torch.ones(1)})[0], torch.eye(2).to_sparse()),
    "a quantised tensor": (
        to_wire({NAMES[0]: torch.ones(1)})[0],
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_gradients_that_cannot_be_are_refused(what: str) -> None:
    """With an error that shows nothing of what has come."""
    packed, *tensors = BROKEN[what]
    with pytest.raises(ProtocolError) as caught:
        from_wire(packed, tensors)
    assert len(str(caught.value)) < 100 and caught.value.__cause__ is None


@pytest.mark.parametrize("packed", [b"", b"\x91\x01", b"\x92\x01\x01\x01", b"\x81\x01\x02", b"\x92\xa1x\x01", None])
def test_names_and_references_that_cannot_be_are_refused(packed: Any) -> None:
    """As gradients are."""
    for read in (unpack_names, unpack_reference):
        with pytest.raises(ProtocolError, match=r"gradients|names"):
            read(packed)
