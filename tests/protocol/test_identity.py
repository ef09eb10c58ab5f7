"""Names, WorkerInfo and the record that peers exchange."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiorpc.errors import ProtocolError, RpcUsageError
from aiorpc.protocol.identity import WorkerInfo, WorkerRecord, check_name, legible

NAMES = st.text("abcXYZ019-_:", min_size=1, max_size=127)
TEXTS = st.text(max_size=60)
RECORD = WorkerRecord("worker0", 0, "0af3", "boot:1:2", "node", 17, "file:/a.py:00", "/run/s", "10.0.0.1", 2000)


def test_worker_info_prints_as_torch_prints_it() -> None:
    """repr names the id first, then the name."""
    assert repr(WorkerInfo("worker0", 0)) == "WorkerInfo(id=0, name=worker0)"


@pytest.mark.parametrize("name", ["worker0", "a", "A-b_c:0", "x" * 127])
def test_good_names_pass(name: str) -> None:
    """Letters, digits, minus, underscore and colon, up to 127 characters."""
    assert check_name(name) == name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("", "must be non-empty"),
        ("x" * 128, "shorter than 128"),
        ("a b", r"Worker name must match \^\[A-Za-z0-9-_:\]\*\$"),
        ("a\n", "Worker name must match"),
        ("wörker", "Worker name must match"),
        ("٣", "Worker name must match"),
        (3, "must be a string"),
    ],
)
def test_bad_names_are_refused_in_torchs_words(name: object, text: str) -> None:
    """Each kind of bad name is a usage error that says which rule it breaks."""
    with pytest.raises(RpcUsageError, match=text):
        check_name(name)


@given(
    st.builds(
        WorkerRecord,
        name=NAMES,
        id=st.integers(0, 2**31 - 1),
        incarnation=TEXTS,
        host=TEXTS,
        hostname=TEXTS,
        pid=st.integers(1, 2**32 - 1),
        main=TEXTS,
        unix_path=TEXTS,
        tcp_host=TEXTS,
        tcp_port=st.integers(0, 65535),
        role=NAMES | st.just(""),
        tls=st.sampled_from(["", "1.3"]),
        python=st.sampled_from(["", "3.11.7"]),
        torch=TEXTS,
    )
)
def test_a_record_survives_the_wire(record: WorkerRecord) -> None:
    """to_wire, msgpack and from_wire give the same record, and its public part."""
    received = WorkerRecord.from_wire(msgpack.unpackb(msgpack.packb(record.to_wire())))
    assert received == record
    assert received.info == WorkerInfo(record.name, record.id)


@pytest.mark.parametrize(
    ("index", "value", "text"),
    [
        (0, "", "name must be one"),
        (0, 5, r"`str`.*\$\.name"),
        (1, -1, r">= 0.*\$\.id"),
        (1, True, r"`int`.*\$\.id"),
        (1, 1.5, r"`int`.*\$\.id"),
        (2, None, r"`str`.*\$\.incarnation"),
        (3, b"x", r"`str`.*\$\.host"),
        (4, "x" * 5000, r"<= 4096.*\$\.hostname"),
        (5, 0, r">= 1.*\$\.pid"),
        (9, 65536, r"<= 65535.*\$\.tcp_port"),
        (10, None, r"`str`.*\$\.role"),
        (10, "an actor", "role must be one"),
        (10, "*", "role must be one"),
        (13, 3, r"`str`.*\$\.python"),
        (14, "x" * 65, r"<= 64.*\$\.torch"),
        (15, None, r"`str`.*\$\.aiorpc"),
    ],
)
def test_a_malformed_part_of_a_record_is_a_protocol_error(index: int, value: object, text: str) -> None:
    """The error names the part and what it must be, and does not repeat a long value."""
    wire: list[object] = list(RECORD.to_wire())
    wire[index] = value
    with pytest.raises(ProtocolError, match=text) as caught:
        WorkerRecord.from_wire(wire)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("value", [None, 3, "abcdefghijk", b"abcdefghijk", {}, [], RECORD.to_wire()[:-1]])
def test_what_is_no_record_is_a_protocol_error(value: object) -> None:
    """Other types and other lengths are refused."""
    with pytest.raises(ProtocolError, match="a list of 16 items"):
        WorkerRecord.from_wire(value)


@given(st.recursive(st.none() | st.booleans() | st.integers() | TEXTS | st.binary(), st.lists, max_leaves=12))
def test_anything_a_peer_may_send_gives_a_record_or_a_protocol_error(value: object) -> None:
    """No other exception escapes from_wire."""
    try:
        WorkerRecord.from_wire(value)
    except ProtocolError as error:
        assert str(error)


@given(st.text(st.characters(exclude_categories=())) | st.binary().map(os.fsdecode))
def test_a_record_carries_any_legible_text(text: str) -> None:
    """Whatever the kernel has for a name, with bytes that are no UTF-8 and control characters."""
    record = replace(RECORD, hostname=legible(text))
    assert WorkerRecord.from_wire(json.loads(json.dumps(record.to_wire()).encode())) == record
    assert record.hostname.isprintable() and len(record.hostname) == len(text)
