"""What workers say to each other of published values: golden bytes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from aiorpc.errors import ProtocolError, RpcUsageError
from aiorpc.protocol.frames import MAX_SEGMENTS
from aiorpc.protocol.packing import pack
from aiorpc.protocol.publication import (
    LAST_VERSION,
    MESSAGES,
    VERSIONS_LIMIT,
    AskLeader,
    Claim,
    DigestWanted,
    Edition,
    Latest,
    LatestWanted,
    LeaveWanted,
    Message,
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
GOLDEN: list[tuple[Message, str]] = [
    (Claim("n", 2, 1, "w", 7), "96a5636c61696da16e0201a17707"),
    (Unpublished("n", 2), "93ab756e7075626c6973686564a16e02"),
    (LatestWanted("n"), "92ad6c61746573742077616e746564a16e"),
    (Latest("n", 4, 3), "94a66c6174657374a16e0403"),
    (Want("n", 1, 0, True, [], False), "97a477616e74a16e0100c390c2"),
    (AskLeader("n", 3, 5), "94a361736ba16e0305"),
    (PieceWanted("n", 4, 64, 128), "95a57069656365a16e0440cc80"),
    (VersionArrived("n", 1, 4), "94a761727269766564a16e0104"),
    (StillFetching("n"), "92a86665746368696e67a16e"),
    (LeaveWanted("n"), "92ac6c656176652077616e746564a16e"),
    (DigestWanted("n", 4), "93ad6469676573742077616e746564a16e04"),
    (VersionsReleased("n", 1, [2, 3]), "94a872656c6561736564a16e01920203"),
    (SubscriptionClosed("n", 1, [3]), "94a6636c6f736564a16e019103"),
    (
        EDITION,
        "9ca765646974696f6e0503a1614091920040940109cd2000c4106e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6ec3920102a16dc091a172",
    ),
    (EDITION._replace(offer=None, source=2), "9ca765646974696f6e0503a1614091920040c0c3920102a16d0291a172"),
]


@pytest.mark.parametrize(("message", "digits"), GOLDEN, ids=lambda value: type(value).__name__)
def test_golden_bytes(message: Message, digits: str) -> None:
    """The bytes of each message are what they were, and are read as the message."""
    assert write(message).hex() == digits
    assert read(type(message), bytes.fromhex(digits)) == message


def test_each_message_has_golden_bytes() -> None:
    """None is forgotten."""
    assert {type(message) for message, _ in GOLDEN} == set(MESSAGES.classes.values())


@pytest.mark.parametrize(
    "message",
    [
        Claim("no name", 1, 0, "w", 1),
        Claim("n", -1, 0, "w", 1),
        Want("n" * 128, 1, 0, True, [], False),
        Want("n", 1, LAST_VERSION + 1, True, [], False),
        VersionsReleased("n", 1, [1, -1]),
        EDITION._replace(version=0),
        EDITION._replace(spans=[[0, 65]]),
        EDITION._replace(spans=[[-1, 3]]),
        EDITION._replace(spans=[[0]]),
        EDITION._replace(spans=[[0, 0]] * (MAX_SEGMENTS + 1)),
        EDITION._replace(size=-1),
        EDITION._replace(source=-1),
        VersionArrived("n", 1, -1),
        DigestWanted("n", LAST_VERSION + 1),
        PieceWanted("n", 1, -1, 5),
        EDITION._replace(offer=OFFER._replace(fd=-1)),
    ],
)
def test_what_cannot_be_is_refused(message: Message) -> None:
    """Names, numbers and places are looked at where a message arrives."""
    with pytest.raises(ProtocolError):
        read(type(message), write(message))


@pytest.mark.parametrize(
    "message",
    [Want("n", 1, 0, True, [], False), VersionsReleased("n", 1, []), SubscriptionClosed("n", 1, [])],
    ids=lambda value: type(value).__name__,
)
def test_lists_of_versions_are_bounded(message: Want | VersionsReleased | SubscriptionClosed) -> None:
    """One that is too long is refused by its length, as memory is bounded."""
    fields: list[Any] = MESSAGES.write(message)
    versions = next(field for field in fields if isinstance(field, list))
    versions += [1] * VERSIONS_LIMIT
    assert read(type(message), pack(fields))
    versions.append(1)
    with pytest.raises(ProtocolError, match=rf"length <= {VERSIONS_LIMIT}"):
        read(type(message), pack(fields))


@pytest.mark.parametrize("said", [None, "text", b"", b"\xc1", pack(["claim"]), pack(["other", 1]), [1]])
def test_what_is_no_message_is_refused(said: Any) -> None:
    """Whatever somebody sends in its place."""
    with pytest.raises(ProtocolError):
        read(Claim, said)


@pytest.mark.parametrize(
    "fields",
    [
        {"spans": [[0, "64"]]},
        {"spans": [[0, 64], 5]},
        {"spans": [(0, 64), {"0": 64}]},
        {"spans": "0"},
        {"slots": [1, None]},
        {"slots": [True]},
        {"slots": [[1]]},
        {"slots": {"1": 1}},
        {"version": True},
        {"worker": None},
        {"source": "1"},
        {"roles": [1]},
        {"offer": [1, 9, 8192]},
    ],
)
def test_fields_of_other_types_are_refused(fields: dict[str, Any]) -> None:
    """In a message that has lists, lists of lists, and another message in it."""
    assert read(Edition, write(EDITION)) == EDITION
    with pytest.raises(ProtocolError):
        read(Edition, write(EDITION._replace(**fields)))


def test_another_message_is_refused() -> None:
    """Each handler takes one kind alone."""
    with pytest.raises(ProtocolError, match=r"a Want .* in place of a Claim"):
        read(Claim, write(Want("n", 1, 0, True, [], False)))


def test_names() -> None:
    """Those of files and of options are names, too."""
    for name in ("policy", "a/b.c:d-e_f", "0"):
        assert check_name(name) == name
    for wrong in ("", "a b", "ä", "n" * 128, "a\n", None, 3):
        with pytest.raises(RpcUsageError, match="name"):
            check_name(wrong)


def test_quorums() -> None:
    """A number, a share, or all."""
    assert [needed(quorum, 8) for quorum in (None, 3, 9, 0.5, 0.01, 1.0)] == [8, 3, 9, 4, 1, 8]
    assert [needed(quorum, 0) for quorum in (None, 3, 0.5)] == [0, 3, 0]
    for wrong in (0, -1, 1.1, 0.0, True, "half", float("nan")):
        with pytest.raises(RpcUsageError, match="quorum"):
            needed(wrong, 8)  # type: ignore[arg-type]  # that is the point


def test_a_share_of_readers_is_what_it_is_in_decimals() -> None:
    """What floats make of a share must not ask for one reader more, and the smallest share asks for one."""
    assert (needed(0.28, 25), needed(0.29, 25), needed(0.07, 100)) == (7, 8, 7)
    assert needed(1e-10, 5) == 1
