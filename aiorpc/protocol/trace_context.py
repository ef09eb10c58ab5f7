"""The trace context of W3C, level 2, as it travels with a call: which texts are one, and what becomes of others.

What the recommendation says of a vendor that receives one holds here. A `traceparent` that is none is ignored, with its
`tracestate`; of a `tracestate` that is none only itself is ignored. A `traceparent` of a later version goes on as one
of version 00, with the fields that this version has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

#: Members of a `tracestate`, and characters of it.
MOST_MEMBERS, MOST_CHARACTERS = 32, 512
_LENGTH = 55  # characters of a traceparent of version 00
_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_VALUE = r"[ -+\--<>-~]{0,255}[!-+\--<>-~]"  # printable, without comma and equals sign, and no blank at the end
_MEMBER = re.compile(rf"([a-z0-9][a-z0-9_\-*/@]{{0,255}})={_VALUE}")


class TraceContext(NamedTuple):
    """The headers of a trace context: what a call is part of, for OpenTelemetry and others that draw traces.

    traceparent: version, id of the trace, id of the span and flags, as ``00-4bf92f...-00f067aa0ba902b7-01``.
    tracestate: what vendors add, as ``vendor=value,other=value``; empty if there is nothing.
    """

    traceparent: str
    tracestate: str = ""

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> TraceContext | None:
        """The context of a carrier of a propagator: a mapping with ``traceparent`` and, maybe, ``tracestate``.

        None if there is no valid ``traceparent``. A ``tracestate`` that is not valid is left out.
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
    """That context, as far as it may go on; None if its `traceparent` is none."""
    parent, state = context
    if not _PARENT.match(parent):
        return None
    if len(parent) > _LENGTH and (parent[:2] == "00" or parent[_LENGTH] != "-"):
        return None
    if parent[:2] != "00":
        parent = f"00{parent[2:_LENGTH]}"
    return TraceContext(parent, state if _is_state(state) else "")


def _is_state(state: str) -> bool:
    if len(state) > MOST_CHARACTERS:
        return False
    members = [each for each in (part.strip(" \t") for part in state.split(",")) if each]
    matches = [_MEMBER.fullmatch(each) for each in members]
    keys = {match[1] for match in matches if match is not None}
    return len(members) <= MOST_MEMBERS and len(keys) == len(members)
