"""Putting messages together by itself: what a device refuses in the midst of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from aiorpc.channels.landing import Landing
from aiorpc.protocol.frames import PARCEL, REPLY, Frame
from aiorpc.protocol.messages import Parcel
from aiorpc.protocol.packing import pack, unpack
from aiorpc.runtime.links.messages import DEVICE
from aiorpc.runtime.links.reassembly import Assembly, Message, Reassembly
from tests.channels.device.ends import IpcEnds


class Refusing(Landing):
    """Its streams cannot be made current."""

    def entered(self) -> Any:
        raise RuntimeError("the device is lost")


def test_slots_of_a_message_whose_streams_cannot_be_entered_come_back() -> None:
    """It fails, and its sender may use them for others."""
    ends = IpcEnds()
    failed: list[Exception | None] = []

    def deliver(message: Message, assembly: Assembly) -> None:
        failed.append(assembly.failure)

    link = SimpleNamespace(
        accelerators=SimpleNamespace(land=lambda: Refusing(ends.fakes[1])),
        distribution=SimpleNamespace(channels={DEVICE: ends.devices[1]}),
        deliver=deliver,
    )
    ends.post(ends.send([ends.make_on(0, "cuda:1", b"x" * 100)]))
    ends.settle()
    for _ in range(3):
        (wire,) = ends.send([ends.make_on(0, "cuda:1", b"y" * 100)]).wires
        assert wire is not None and ends.devices[1].is_here(wire)
        parcel = Parcel(REPLY, [(DEVICE, unpack(pack(wire)))], b"")
        assert Reassembly(cast(Any, link)).open_one(Frame(PARCEL, 1, b"", []), parcel, ends.devices[1]) is None
        ends.settle()
    assert [str(failure) for failure in failed] == ["the device is lost"] * 3
    assert ends.devices[0].under_way["slots"] == 0
    ends.finish()
