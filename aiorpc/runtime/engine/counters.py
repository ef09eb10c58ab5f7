"""Running counts of one worker."""

from __future__ import annotations

from collections.abc import Mapping

from ...channels import Traffic
from ...protocol.states import CallOutcome
from ...transport.connection import Connection


class Counters:
    """Counts are added to without locks: no other thread runs within a step, because none has a call in it."""

    def __init__(self) -> None:
        self.made = 0  # calls of users made here; each try of a call with retries is one
        self.made_ended: dict[CallOutcome, int] = dict.fromkeys(CallOutcome, 0)  # ended ones
        self.served = 0  # calls of users served here
        self.served_ended: dict[CallOutcome, int] = dict.fromkeys(CallOutcome, 0)  # and refused ones
        self.failed_unheard = 0  # handlers that raised after their callers had given up
        self.late_answers = 0
        self.retried = 0
        self.bytes_sent: int = 0  # of connections that have ended
        self.bytes_received: int = 0
        self.messages_sent = 0  # of links that have ended
        self.messages_received = 0
        self.refused = 0
        self.given_up = 0  # handshakes whose other end went away
        self.suspended = 0  # connections that broke, and might go on
        self.resumed = 0  # of these, those that went on
        self.traffic: dict[str, Traffic] = {}  # of links that have ended, by channel
        self.latencies: list[int] = [0] * 64  # answers by the number of bits of their latency in microseconds

    def add_connection(self, connection: Connection) -> None:
        """A connection has ended; its bytes still count."""
        self.bytes_sent += connection.bytes_sent
        self.bytes_received += connection.bytes_received

    def add_traffic(self, moved: Mapping[str, Traffic]) -> None:
        """A link has ended; what it has moved by each channel still counts."""
        for name, traffic in moved.items():
            self.traffic.setdefault(name, Traffic())._add(traffic)

    def answered(self) -> int:
        """Calls that got an answer."""
        return sum(self.latencies)

    def quantile(self, share: float) -> float:
        """Seconds within which that share of the answers came, to within a factor of two; 0.0 without answers."""
        total = self.answered()
        seen = 0
        for bits, count in enumerate(self.latencies):
            seen += count
            if total and seen >= share * total:
                return float(1 << bits) / 1e6
        return 0.0
