"""Numbers as people read them. Imports no torch."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes: ``0 B``, ``1.5 kB``, ``12 MB``; powers of a thousand."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{_short(count) if unit != 'B' else f'{count:.0f}'} {unit}"
        count /= 1000
    return f"{_short(count)} TB"


def rate(count: float) -> str:
    """How many in a second: ``0``, ``0.3``, ``12``, ``3400``."""
    return "0" if count <= 0 else f"{count:.2f}" if count < 0.095 else _short(count)


def duration(seconds: float | None) -> str:
    """``35 µs``, ``1.2 ms``, ``3.4 s``, ``12 min``, ``3.2 h``; empty for None."""
    if seconds is None:
        return ""
    for factor, unit, limit in ((1e6, "µs", 1e-3), (1e3, "ms", 1.0), (1.0, "s", 120.0), (1 / 60, "min", 7200.0)):
        if seconds < limit * 0.9995:
            return f"{_short(seconds * factor)} {unit}"
    return f"{_short(seconds / 3600)} h"


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0") if number < 9.95 else f"{number:.0f}"
