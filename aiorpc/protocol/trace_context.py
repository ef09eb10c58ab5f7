"""The trace context of W3C, level 2, as it travels with a call: valid texts, and the handling of others.

The rules are the recommendation's for a vendor that receives one. An invalid `traceparent` is ignored, with its
`tracestate`; an invalid `tracestate` is ignored alone. A `traceparent` of a later version is passed on as one of
version 00, with the fields of that version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

#: Members of a `tracestate`, and characters of it.
MOST_MEMBERS, MOST_CHARACTERS = 32, 512
_LENGTH = 55  # characters of a traceparent of version 00
_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_VALUE = r"[ -+\--<>-~]{0,255}[!-+\--<>-~]"  # printable, without comma and equals sign, and without a blank at the end
_MEMBER = re.compile(rf"([a-z0-9][a-z0-9_\-*/@]{{0,255}})={_VALUE}")


class TraceContext(NamedTuple):
    """The headers of a trace context: the trace that a call is part of, for OpenTelemetry and other tracers.

    traceparent: version, id of the trace, id of the span and flags, such as ``00-4bf92f...-00f067aa0ba902b7-01``.
    tracestate: additions of vendors, such as ``vendor=value,other=value``; may be empty.
    """

    traceparent: str
    tracestate: str = ""

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> TraceContext | None:
        """The context of a propagator's carrier: a mapping with ``traceparent`` and, optionally, ``tracestate``.

        None if there is no valid ``traceparent``. An invalid ``tracestate`` is left out.
        """
        parent = headers.get("traceparent")
        return None if parent is None else valid(cls(parent, headers.get("tracestate", "")))

    def headers(self) -> dict[str, str]:
        """A carrier for a propagator, without an empty ``tracestate``."""
        headers = {"traceparent": self.traceparent}
        if self.tracestate:
            headers["tracestate"] = self.tracestate
        return headers


def valid(context: TraceContext) -> TraceContext | None:
    """The context with its valid parts; None if its `traceparent` is invalid."""
    parent, state = context
    if not _PARENT.match(parent):
        return None
    if len(parent) > _LENGTH and (parent[:2] == "00" or parent[_LENGTH] != "-"):
        return None
    if parent[:2] != "00":
        parent = f"00{parent[2:_LENGTH]}"
    elif not state:
        return context
    return TraceContext(parent, state if _is_state(state) else "")


def _is_state(state: str) -> bool:
    if len(state) > MOST_CHARACTERS:
        return False
    members = [each for each in (part.strip(" \t") for part in state.split(",")) if each]
    matches = [_MEMBER.fullmatch(each) for each in members]
    keys = {match[1] for match in matches if match is not None}
    return len(members) <= MOST_MEMBERS and len(keys) == len(members)
