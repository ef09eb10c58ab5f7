"""When a block goes back: with the last of all that looks at it, whatever that is and wherever it dies.

The blocks are of a real arena that overwrites what is freed, so a block that went back too early shows in its views.
Each block is filled with one byte, so what a view of any type and shape must show is known.
"""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy
import pytest
import torch

from aiorpc.channels import layout
from aiorpc.channels.arena import ALIGN, Block
from aiorpc.channels.shm import Borrower, Lender
from aiorpc.protocol.frames import Buffer
from tests.channels.ends import GrowingArena
from tests.processes.zygote import Zygote, zygote
from tests.tensors import describe_on_host

KIB, MIB = 1 << 10, 1 << 20


def padded(buffer: Buffer) -> bytes:
    """Its bytes, up to where another one may begin."""
    return bytes(buffer) + bytes(-len(buffer) % ALIGN)


class Wire:
    """A lender and a borrower of one process, each with its own mapping, and what travels between them."""

    def __init__(self, limit: int = 64 * MIB) -> None:
        self.arena = GrowingArena(limit, segment_size=8 * MIB, poison=True)
        # All of the limit may be lent, and nothing is copied out: that is not what is tested here.
        self.lender = Lender(self.arena, share=1.0, soft=1.0, most=1.0)
        self.loans = 0
        self.borrower = Borrower(self._on_loan)
        self.sent = self.back = 0
        self._counting = threading.Lock()

    def _on_loan(self) -> None:
        with self._counting:
            self.loans += 1

    def send(self, tensors: list[torch.Tensor], packed: bool = False) -> tuple[list[torch.Tensor], list[list[int]]]:
        """The same tensors at the receiver, over adopted blocks; and the numbers of these blocks.

        packed: all of them in one block, instead of one block for each buffer.
        """
        table, buffers = describe_on_host(tensors)
        if packed:
            wires, places = [self.lend(b"".join(padded(buffer) for buffer in buffers))], []
            whole, at = self.borrower.adopt(wires[0]), 0
            for buffer in buffers:
                places.append(whole[at : at + len(buffer)])
                at += len(padded(buffer))
        else:
            wires = [self.lend(buffer) for buffer in buffers]
            places = [self.borrower.adopt(wire) for wire in wires]
        taken: list[Any] = list(places)
        return layout.rebuild(table, taken), wires

    def lend(self, buffer: Buffer) -> list[int]:
        """The numbers of a block with these bytes; its segment is mapped."""
        lent = self.lender.lend(buffer)
        assert lent is not None, self.lender.refused
        for segment in self.arena.segments:
            path = f"/proc/self/fd/{segment.fd}"
            self.borrower.map(segment.index, path, segment.size, segment.nonce)
        with self._counting:
            self.sent += 1
        return list(lent[0])

    def settle(self) -> list[Block]:
        """What was released goes to the lender, which refuses what was released before."""
        blocks = self.borrower.drain()
        self.lender.released(blocks)
        with self._counting:
            self.back += len(blocks)
        return blocks

    def check_empty(self) -> None:
        """Everything came back, and once."""
        gc.collect()
        self.settle()
        assert (self.back, self.loans, self.borrower.blocks, self.borrower.held) == (self.sent, self.sent, 0, 0)
        assert not self.borrower.borrowed
        assert (self.lender.leases, self.lender.lent, self.arena.blocks, self.arena.used) == (0, 0, 0, 0)

    def close(self) -> None:
        self.borrower.close()
        self.arena.close()


@contextmanager
def wired(limit: int = 64 * MIB) -> Iterator[Wire]:
    wire = Wire(limit)
    try:
        yield wire
    finally:
        wire.close()


# ---- views, and what holds them


def shown(view: Any) -> numpy.ndarray[Any, numpy.dtype[numpy.uint8]]:
    """The bytes that a view of any kind shows, as a copy."""
    if isinstance(view, torch.UntypedStorage):
        view = torch.empty(0, dtype=torch.uint8).set_(view)
    if isinstance(view, torch.Tensor):
        view = view.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy()
    return numpy.frombuffer(memoryview(view).tobytes(), numpy.uint8)


class Plain:
    """Holds a view by an attribute."""

    def __init__(self, view: Any) -> None:
        self.view = view

    def look(self) -> Any:
        """The view."""
        return self.view

    def let_go(self) -> None:
        """Before it is dropped."""


class InClosure(Plain):
    """By a variable of a function."""

    def __init__(self, view: Any) -> None:
        self.look = lambda: view  # type: ignore[method-assign]  # replaced for this test


class InGenerator(Plain):
    """By the frame of a generator."""

    def __init__(self, view: Any) -> None:
        def holding() -> Iterator[Any]:
            while True:
                yield view

        self._generator = holding()

    def look(self) -> Any:
        return next(self._generator)


class InGraph(Plain):
    """By the graph of a product that autograd has saved it for, and by nothing else."""

    def __init__(self, view: torch.Tensor) -> None:
        self._weight = torch.ones(view.shape, dtype=view.dtype, requires_grad=True)
        self._product = self._weight * view.data  # with a version counter of its own

    def look(self) -> Any:
        node: Any = self._product.grad_fn
        return node._saved_other.data  # what is done to it is not seen by the graph

    def let_go(self) -> None:
        """The backward pass: it needs the view, and then lets go of it although the graph lives."""
        self._product.backward(torch.ones_like(self._product))
        self.gradient = self._weight.grad


class InThread(Plain):
    """By a variable of another thread, where it also dies."""

    def __init__(self, view: Any) -> None:
        self._orders: SimpleQueue[Any] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=self._hold, daemon=True)
        self._thread.start()
        self._orders.put(view)

    def _hold(self) -> None:
        view = self._orders.get()
        while self._orders.get():
            self._answers.put(view)

    def look(self) -> Any:
        self._orders.put(True)
        return self._answers.get(timeout=30)

    def let_go(self) -> None:
        self._orders.put(False)
        self._thread.join(10)
        assert not self._thread.is_alive()


class InCycle(Plain):
    """By an object that refers to itself: only the collector finds it."""

    def __init__(self, view: Any) -> None:
        super().__init__(view)
        self.cycle = self


class OwnCycle(InCycle):
    """By an attribute of the tensor itself."""

    def __init__(self, view: Any) -> None:
        Plain.__init__(self, view.view_as(view))
        self.view.cycle = self.view


HOLDERS: tuple[type[Plain], ...] = (Plain, InClosure, InGenerator, InThread, InCycle)
TENSOR_HOLDERS: tuple[type[Plain], ...] = (*HOLDERS, InGraph, OwnCycle)

# One view out of another. What they get is not empty, and its elements may lie anywhere.
OF_TENSOR: dict[str, Callable[[torch.Tensor], Any]] = {
    "slice": lambda view: view[: max(1, len(view) // 2)],
    "stride": lambda view: view[::3],
    "flat": lambda view: view.reshape(-1) if view.is_contiguous() else view[:1],
    "view as bytes": lambda view: as_bytes(view),
    "transpose": lambda view: view.transpose(0, -1),
    "narrow": lambda view: view.narrow(0, len(view) // 2, 1),
    "expand": lambda view: view[None].expand(2, *view.shape)[:, :2],
    "unbind": lambda view: view[-5:].unbind(0)[-1][None],
    "detach": lambda view: view.detach(),
    "data": lambda view: view.data,
    "parameter": lambda view: torch.nn.Parameter(view.detach(), requires_grad=False),
    "data of a parameter": lambda view: torch.nn.Parameter(view.detach(), requires_grad=False).data,
    "alias": lambda view: torch.ops.aten.alias(view),
    "storage": lambda view: view.untyped_storage(),
    "set_": lambda view: torch.empty(0, dtype=view.dtype).set_(view.untyped_storage()),
    # torch has the overload, its stubs do not.
    "set_ to a tensor": lambda view: torch.empty(5, dtype=view.dtype).set_(view.detach()),  # type: ignore[call-overload]  # torch takes it
    "set_data": lambda view: with_data(view),
    "as_strided": lambda view: view.as_strided((1, 1), (7, 1)),
    "numpy": lambda view: as_bytes(view).numpy(),
    "memoryview": lambda view: as_bytes(view).numpy().data,
    "dlpack": lambda view: torch.from_dlpack(view.detach()),
    "shallow copy": lambda view: copy.copy(view.detach()),
}
OF_ARRAY: dict[str, Callable[[Any], Any]] = {
    "slice": lambda view: view[: max(1, len(view) // 2)],
    "reverse": lambda view: view[::-1],
    "asarray": lambda view: numpy.asarray(view),
    "memoryview": lambda view: memoryview(view),
    "tensor": lambda view: torch.from_numpy(view[tuple(slice(None, None, 1 - 2 * (s < 0)) for s in view.strides)]),
    "frombuffer": lambda view: numpy.frombuffer(view, view.dtype) if view.flags.c_contiguous else view[:1],
    "transpose": lambda view: view.T,
}
OF_MEMORYVIEW: dict[str, Callable[[memoryview], Any]] = {
    "slice": lambda view: view[: max(1, len(view) // 2)],
    "array": lambda view: numpy.asarray(view),
    "cast": lambda view: view.cast("B") if view.c_contiguous else view[:1],
    "tensor": lambda view: torch.frombuffer(view, dtype=torch.uint8) if view.c_contiguous else view[:1],
}
OF_STORAGE: dict[str, Callable[[torch.UntypedStorage], Any]] = {
    "tensor": lambda view: torch.empty(0, dtype=torch.uint8).set_(view),
    "typed tensor": lambda view: torch.empty(0, dtype=torch.int16).set_(
        view, 3, (4, min(5, view.nbytes() // 46)), (5, 1)
    ),
}


def as_bytes(view: torch.Tensor) -> torch.Tensor:
    """Bytes of the view: all of them where they lie side by side, else those of one element."""
    size = view.numel() if view.is_contiguous() else 1
    return view.detach().as_strided((size,), (1,)).view(torch.uint8)


def with_data(view: torch.Tensor) -> torch.Tensor:
    """A tensor that was another one before."""
    tensor = torch.empty(3, dtype=view.dtype)
    tensor.data = view
    return tensor


def filled(value: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor all of whose bytes are the value."""
    size = numpy.prod(shape) * dtype.itemsize
    return torch.full((int(size),), value, dtype=torch.uint8).view(dtype).view(shape)


KINDS = [
    *(("tensor", name) for name in OF_TENSOR),
    *(("array", name) for name in OF_ARRAY),
    *(("memoryview", name) for name in OF_MEMORYVIEW),
    *(("storage", name) for name in OF_STORAGE),
]


@pytest.mark.parametrize(("source", "name"), KINDS, ids=lambda part: str(part))
def test_each_kind_of_view_keeps_the_block(source: str, name: str) -> None:
    """Alone, with everything else gone, on each kind of holder; and lets go of it."""
    tables: dict[str, tuple[Callable[[torch.Tensor], Any], dict[str, Callable[[Any], Any]]]] = {
        "tensor": (lambda tensor: tensor, OF_TENSOR),
        "array": (lambda tensor: tensor.view(torch.uint8).numpy(), OF_ARRAY),
        "memoryview": (lambda tensor: as_bytes(tensor).numpy().data, OF_MEMORYVIEW),
        "storage": (lambda tensor: tensor.untyped_storage(), OF_STORAGE),
    }
    make, table = tables[source]
    with wired() as wire:
        tensors, _ = wire.send([filled(7, (60, 60), torch.float32)])
        view = table[name](make(tensors.pop()))
        kinds = [kind for kind in TENSOR_HOLDERS if isinstance(view, torch.Tensor) or kind in HOLDERS]
        for kind in kinds:
            if kind is InGraph and view.dtype != torch.float32:
                continue
            holder = kind(view)
            del view
            gc.collect()
            assert wire.settle() == [] and (shown(holder.look()) == 7).all()
            view = holder.look()
            holder.let_go()
            del holder
            gc.collect()
            assert wire.settle() == [] and (shown(view) == 7).all()
        del view
        wire.check_empty()


def test_backward_lets_go_although_the_graph_lives() -> None:
    """Saved for a backward pass, a view is kept by the graph; after the pass only the result is left."""
    with wired() as wire:
        tensors, _ = wire.send([filled(3, (2000,), torch.float32)])
        holder = InGraph(tensors.pop())
        assert wire.settle() == [] and (shown(holder.look()) == 3).all()
        holder.let_go()
        assert len(wire.settle()) == 1 and (shown(holder.gradient) == 3).all()
        wire.check_empty()


# ---- forks, and the end of the interpreter


def ends_well(body: Callable[[], None]) -> bool:
    """Run it in a forked child, for half a minute at most; whether it returned."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@pytest.mark.parametrize("closed", [False, True], ids=["as it is", "closed in the child"])
def test_a_forked_child_releases_nothing(closed: bool) -> None:
    """What dies in a child, on its threads or in its collector, is still its parent's, and is released there once."""
    with wired() as wire:
        tensors, _ = wire.send([filled(5, (3000,), torch.float32), filled(6, (9000,), torch.uint8)])
        held: list[Plain] = [InClosure(tensors[0][5:]), InCycle(tensors[1]), InGraph(tensors[0])]

        def in_child() -> None:
            if closed:
                wire.borrower.close()
            assert (shown(tensors[0]) == 5).all()
            holders = list(held)
            held.clear()
            thread = threading.Thread(target=tensors.clear)
            thread.start()
            thread.join(5)
            for holder in holders:
                holder.let_go()
            del holders, holder
            gc.collect()
            assert tensors == [] and wire.borrower.drain() == []

        assert ends_well(in_child)
        assert wire.settle() == [] and wire.lender.leases == 2
        assert (shown(tensors[0]) == 5).all() and (shown(tensors[1]) == 6).all()
        tensors.clear()
        held.clear()
        del in_child
        wire.check_empty()


PROGRAM = """
import gc, sys, threading, time
from tests.channels.test_release import *
wire = Wire()
tensors, _ = wire.send([filled(5, (3000,), torch.float32), filled(6, (9000,), torch.uint8)])
HOLD
print(int(shown(tensors[0])[0]), flush=True)
"""
EXITS = {
    "globals": "view = tensors[0][3:].numpy()",
    "a cycle": "holder = InCycle(tensors[1]); del holder",
    "a graph": "holder = InGraph(tensors[0])",
    "a daemon thread": "holder = InThread(tensors[0]); holder.look()",
    "a callback of the collector": "gc.callbacks.append(lambda phase, info: tensors)",
    "another module": "sys.modules['torch'].kept = tensors[0]; torch.nn.kept = InClosure(tensors[1])",
    "everything gone but views": "view = tensors[0].t(); memory = tensors[1].numpy().data; wire.close(); del wire",
    "the arena alone": "wire.arena.close(); view = tensors[0][::2]",
    "at exit": "import atexit; atexit.register(lambda kept: print(int(shown(kept)[0])), tensors[0])",
}
QUICK = ("a daemon thread", "at exit")  # each is an interpreter that ends, which takes a second


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Zygote]:
    """Programs are forked from it, and end as interpreters do."""
    with zygote(__name__) as made:
        yield made


@pytest.mark.parametrize(
    "holder", [each if each in QUICK else pytest.param(each, marks=pytest.mark.long) for each in EXITS]
)
def test_an_interpreter_ends_well_with_live_tensors(holder: str, interpreter: Zygote, tmp_path: Path) -> None:
    """Whatever holds adopted tensors at the end of a program: it ends with 0 and without a word."""
    code = PROGRAM.replace("HOLD", EXITS[holder])
    with interpreter.run(code, [], tmp_path, {"PYTHONWARNINGS": "error"}) as program:
        program.finish(30)
        assert (program.code, program.err) == (0, "")
        assert set(program.out.split()) == {"5"}
