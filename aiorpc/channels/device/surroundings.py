"""What the two sides of the device channel have in common: the ways there are, and what they need around them."""

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
# The slot of an outbox that its nonce is in.
NONCE_SLOT = 0


class Surroundings(Protocol):
    """What the channel needs around it. All from any thread."""

    def post(self, message: Message, *, more: bool = False) -> None:
        """Send a message to the other end. more: another one follows at once."""

    def post_buffer(self, message: Message, buffer: Buffer) -> None:
        """Send a message with a buffer, which is borrowed until it is written."""

    def in_background(self, fn: Callable[..., None], *args: object) -> None:
        """Run something in a thread that may wait for a device."""

    def on_loop(self, function: Callable[..., object], *args: object) -> None:
        """Run something on the loop."""

    def later(self, seconds: float, function: Callable[..., object], *args: object) -> None:
        """Run something on the loop, later."""

    def on_release(self) -> None:
        """`flush` has something to send."""

    def introduced(self, theirs: Any) -> tuple[Route | None, str, str]:
        """The other end's descriptor has come: the route of answers to it, the way (`Sender.choose`), and why."""

    def on_chosen(self, way: str, reason: str) -> None:
        """That way is used for device memory; reason: why not a better one."""

    def hand_over(self, carrier: Tensor, event: Event) -> int:
        """Leave it for the worker at the other end, which is in this process; the number it is found by."""

    def take_over(self, number: int) -> tuple[Tensor, Event] | None:
        """What the other end has left under that number; None if it has taken it back."""

    def take_back(self, number: int) -> None:
        """Nobody will take that over. Whatever is left there goes with the link."""

    def hold(self, boxes: Sequence[BoxEnd]) -> None:
        """Streams, and threads that wait for them, may wait for what the other process does with these: when it dies
        they are to go on."""

    def ended(self, boxes: Sequence[BoxEnd]) -> None:
        """The link has ended; the other process may still use the outboxes among these."""


def failed(error: Exception) -> RpcError:
    """What the device, or its driver, has to say, as that of the transfer."""
    return error if isinstance(error, RpcError) else RpcError(f"the device refused: {type(error).__name__}: {error}")
