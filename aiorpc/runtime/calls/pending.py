"""A call under way, as the user sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PendingCall:
    """One call under way.

    direction: "made" here or "served" here. worker: the name of the other side. function: its name. seconds: since it
    began. deadline: seconds left, None without a limit. made_at: of calls made here, the line of the program.
    """

    direction: str
    worker: str
    function: str
    seconds: float
    deadline: float | None
    made_at: str = ""
