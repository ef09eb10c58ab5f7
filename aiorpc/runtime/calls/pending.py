"""What a worker tells its user about a call that is under way."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PendingCall:
    """One call under way. direction: "made" here or "served" here. seconds: how long. deadline: seconds left."""

    direction: str
    worker: str
    function: str
    seconds: float
    deadline: float | None
    made_at: str = ""
