"""What workers say to each other of published values: golden bytes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import Struct
from msgspec.msgpack import Decoder, encode

from aiorpc.errors import ProtocolError, RpcUsageError
from aiorpc.protocol.frames import MAX_SEGMENTS
from aiorpc.protocol.publication import (
    LAST_VERSION,
    MESSAGES,
    VERSION,
    VERSIONS_LIMIT,
    AskLeader,
    DigestWanted,
    Edition,
    Latest,
    LatestWanted,
    Lease,
    LeaveWanted,
    PieceWanted,
    SlotOffer,
    StillFetching,
    SubscriptionClosed,
    Unpublished,
    VersionArrived,
    VersionsReleased,
    Want,
    check_name,
    needed,
    read,
    write,
)

OFFER = SlotOffer(1, 9, 8192, b"n" * 16)
EDITION = Edition(5, 3, "a", 64, [[0, 64]], OFFER, True, [1, 2], "m", None, ["r"])
SENT: list[Any] = [1, 5, 3, "a", 64, [[0, 64]], [1, 9, 8192, b"n" * 16], True, [1, 2], "m", None, ["r"]]
GOLDEN: list[tuple[Struct, str]] = [
    (Lease("n", 2, 1, "w", 7), "95a16e0201a17707"),
    (Unpublished("n", 2), "92a16e02"),
    (LatestWanted("n"), "91a16e"),
    (Latest("n", 4, 3), "93a16e0403"),
    (Want("n", 1, 0, True, [], False), "96a16e0100c390c2"),
    (AskLeader("n", 3, 5), "9400a16e0305"),
    (PieceWanted("n", 4, 64, 128), "94a16e0440cc80"),
    (VersionArrived("n", 1, 4), "93a16e0104"),
    (StillFetching("n"), "91a16e"),
    (LeaveWanted("n"), "91a16e"),
    (DigestWanted("n", 4), "92a16e04"),
    (VersionsReleased("n", 1, [2, 3]), "93a16e01920203"),
    (SubscriptionClosed("n", 1, [3]), "93a16e019103"),
    (EDITION, "9d010503a1614091920040940109cd2000c4106e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6ec3920102a16dc091a172c0"),
]


@pytest.mark.parametrize(("message", "digits"), GOLDEN, ids=lambda value: type(value).__name__)
def test_golden_bytes(message: Struct, digits: str) -> None:
    """The bytes of each message are what they were, and are read as the message."""
    assert write(message).hex() == digits
    assert read(Decoder(type(message)), bytes.fromhex(digits)) == message


def test_each_message_has_golden_bytes() -> None:
    """None is forgotten."""
    assert {type(message) for message, _ in GOLDEN} == set(MESSAGES)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Lease, ["no name", 1, 0, "w", 1]),
        (Lease, ["n\n", 1, 0, "w", 1]),
        (Lease, ["n", -1, 0, "w", 1]),
        (Want, ["n" * 128, 1, 0, True, [], False]),
        (Want, ["n", 1, LAST_VERSION + 1, True, [], False]),
        (Want, ["n", 1, 0, True, [1] * (VERSIONS_LIMIT + 1), False]),
        (Want, ["n", 1, 0, 1, [], False]),
        (VersionsReleased, ["n", 1, [1, -1]]),
        (VersionsReleased, ["n", 1, [1] * (VERSIONS_LIMIT + 1)]),
        (SubscriptionClosed, ["n", 1, [1] * (VERSIONS_LIMIT + 1)]),
        (VersionArrived, ["n", 1, -1]),
        (DigestWanted, ["n", LAST_VERSION + 1]),
        (PieceWanted, ["n", 1, -1, 5]),
        (Lease, ["n"]),
        (Lease, "text"),
        (Lease, None),
    ],
)
def test_what_cannot_be_is_refused(kind: type[Struct], fields: Any) -> None:
    """Names, numbers, types and lengths are those of the declaration."""
    with pytest.raises(ProtocolError):
        read(Decoder(kind), encode(fields))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (1, 0),
        (1, True),
        (3, None),
        (4, -1),
        (5, [[0, 65]]),
        (5, [[-1, 3]]),
        (5, [[0]]),
        (5, [[0, "64"]]),
        (5, [[0, 64], 5]),
        (5, "0"),
        (5, [[0, 0]] * (MAX_SEGMENTS + 1)),
        (6, [1, -1, 8192, b"n"]),
        (6, [1, 9, 8192]),
        (8, [1, None]),
        (8, [True]),
        (8, {"1": 1}),
        (10, -1),
        (10, "1"),
        (11, [1]),
    ],
)
def test_versions_that_cannot_be_are_refused(place: int, value: Any) -> None:
    """As above, and a buffer lies inside of its version."""
    assert read(VERSION, encode(SENT)) == EDITION
    with pytest.raises(ProtocolError):
        read(VERSION, encode([*SENT[:place], value, *SENT[place + 1 :]]))


@pytest.mark.parametrize("said", [None, "text", b"", b"\xc1", [1], encode([2, "n"])])
def test_an_answer_that_is_no_version_is_refused(said: Any) -> None:
    """Whatever a worker sends in its place."""
    with pytest.raises(ProtocolError):
        read(VERSION, said)


def test_names() -> None:
    """Those of files and of options are names, too."""
    for name in ("policy", "a/b.c:d-e_f", "0"):
        assert check_name(name) == name
    for wrong in ("", "a b", "ä", "n" * 128, "a\n", None, 3):
        with pytest.raises(RpcUsageError, match="name"):
            check_name(wrong)


def test_a_share_of_readers_is_what_it_is_in_decimals() -> None:
    """What floats make of a share must not ask for one reader more, and the smallest share asks for one."""
    assert (needed(0.28, 25), needed(0.29, 25), needed(0.07, 100)) == (7, 8, 7)
    assert needed(1e-10, 5) == 1
