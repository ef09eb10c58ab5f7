"""Where workers meet, as seen from a host."""

from __future__ import annotations

import pytest

from aiorpc.runtime.meeting import meeting_place
from aiorpc.runtime.meeting.meeting_place import MeetingPlace, local_address


@pytest.mark.parametrize(
    ("host", "means", "connected", "address"),
    [
        ("node0", "10.0.0.7", True, "10.0.0.1"),
        ("node0", "127.0.1.1", True, "172.16.0.9"),  # its own name, on a host as Debian sets it up
        ("node0", "127.0.1.1", False, "127.0.0.1"),
        ("localhost", "127.0.0.1", True, "127.0.0.1"),
        ("127.0.1.1", "127.0.1.1", True, "127.0.0.1"),
        ("::1", "::1", True, "::1"),
        ("localhost", "::1 127.0.0.1", True, "127.0.0.1"),
        ("", "", True, "127.0.0.1"),
    ],
)
def test_others_are_led_to_an_address_that_they_can_reach(
    host: str, means: str, connected: bool, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a host's own name stands for its loopback address, which leads others to themselves."""
    own = {"10.0.0.7": "10.0.0.1", "127.0.1.1": "127.0.0.1", "127.0.0.1": "127.0.0.1"}
    if connected:
        own["192.0.2.1"] = "172.16.0.9"
    own["::1"] = "::1"
    monkeypatch.setattr(meeting_place, "addresses_of", lambda _: means.split())
    monkeypatch.setattr(meeting_place, "_own_address", lambda to, _: own.get(to))
    assert local_address(MeetingPlace(0, 2, host=host, port=4000)) == address


@pytest.mark.parametrize(("host", "means"), [("::1", ["::1"]), ("localhost", ["::1", "127.0.0.1"]), ("", [])])
def test_where_there_is_no_ipv4_the_loopback_address_is_that_of_ipv6(
    host: str, means: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing names an address, as when workers meet in a file."""
    monkeypatch.setattr(meeting_place, "addresses_of", lambda _: means)
    monkeypatch.setattr(meeting_place, "_own_address", lambda to, _: to if to == "::1" else None)
    assert local_address(MeetingPlace(0, 2, host=host, port=4000)) == "::1"
