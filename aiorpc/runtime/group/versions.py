"""Warnings about members with other versions of Python, torch or aiorpc than this worker's."""

from __future__ import annotations

from collections.abc import Iterable

from ...logs import logger
from ...protocol.identity import WorkerRecord, legible

_SHOWN = 5  # members in one line


class VersionNotes:
    """Logs each other combination of versions once. On the loop."""

    def __init__(self, own: WorkerRecord) -> None:
        self._own = own
        self._told = {_compared(own)}

    def tell(self, members: Iterable[WorkerRecord]) -> None:
        """Look at the versions of these members."""
        others: dict[tuple[str, ...], list[WorkerRecord]] = {}
        for record in members:
            if record.incarnation != self._own.incarnation:
                others.setdefault(_compared(record), []).append(record)
        for versions, records in others.items():
            if versions in self._told:
                continue
            self._told.add(versions)
            names = ", ".join(repr(each.name) for each in records[:_SHOWN])
            more = f" and {len(records) - _SHOWN} more" if len(records) > _SHOWN else ""
            first = records[0]
            differing = [
                (name, getattr(first, name) or "unknown", getattr(self._own, name) or "unknown")
                for name, theirs, ours in zip(_NAMES, versions, _compared(self._own), strict=True)
                if theirs != ours
            ]
            logger.of(self._own.name).warning(
                "%s%s %s %s; here it is %s.%s",
                names,
                more,
                "runs" if len(records) == 1 else "run",
                ", ".join(f"{_SPELT[name]} {legible(theirs)}" for name, theirs, _ in differing),
                ", ".join(f"{_SPELT[name]} {ours}" for name, _, ours in differing),
                _ADVICE if first.minor != self._own.minor else "",
            )


_NAMES = ("python", "torch", "aiorpc")
_SPELT = {"python": "Python", "torch": "torch", "aiorpc": "aiorpc"}
_ADVICE = (
    " Functions and classes that would travel by value are refused between the two; what both import goes by its name"
)


def _compared(record: WorkerRecord) -> tuple[str, ...]:
    """The versions that matter: builds of torch (+cpu) and patch levels of Python do not."""
    return record.minor, record.torch.partition("+")[0], record.aiorpc
