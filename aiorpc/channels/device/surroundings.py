"""What both sides of the device channel share: the names of the ways, and what the channel needs around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ...errors import RpcError
from ...protocol.frames import Buffer
from ..accelerator import Event, Tensor
from ..routes import Route
from .messages import Message
from .outbox import BoxEnd

DIRECT, IPC, STAGING = "direct", "ipc", "staging"
# The slot of an outbox with its nonce.
NONCE_SLOT = 0


class Surroundings(Protocol):
    """What the channel needs around it. All from any thread."""

    def post(self, message: Message, *, more: bool = False) -> None:
        """Send a message to the other end. more: another one follows at once."""

    def post_buffer(self, message: Message, buffer: Buffer) -> None:
        """Send a message with a buffer. The channel borrows the buffer until it is written."""

    def in_background(self, fn: Callable[..., None], *args: object) -> None:
        """Run something in a thread that may wait for a device."""

    def on_loop(self, function: Callable[..., object], *args: object) -> None:
        """Run something on the loop."""

    def later(self, seconds: float, function: Callable[..., object], *args: object) -> None:
        """Run something on the loop, later."""

    def on_release(self) -> None:
        """`flush` has something to send now."""

    def introduced(self, theirs: Any) -> tuple[Route | None, str, str]:
        """The other end's descriptor has come. Returns the route of answers to it, the way, and the reason for it."""

    def on_chosen(self, way: str, reason: str) -> None:
        """This way is used for device memory; reason: why not a better one."""

    def hand_over(self, carrier: Tensor, event: Event) -> int:
        """Leave it for the worker at the other end, which is in this process; returns the number to find it by."""

    def take_over(self, number: int) -> tuple[Tensor, Event] | None:
        """What the other end has left under that number; None if it has taken it back."""

    def take_back(self, number: int) -> None:
        """Drop what is left under that number. The link's end drops all."""

    def hold(self, boxes: Sequence[BoxEnd]) -> None:
        """Streams, and threads that wait for them, may wait for the other process's work on these boxes: end the waits
        when that process dies."""

    def ended(self, boxes: Sequence[BoxEnd]) -> None:
        """The link has ended; the other process may still use the outboxes among these."""


def failed(error: Exception) -> RpcError:
    """An error of the device or its driver, as the error of the transfer."""
    return error if isinstance(error, RpcError) else RpcError(f"the device refused: {type(error).__name__}: {error}")
