"""Whatever somebody else has written into the store: joining raises RendezvousError, in time, and nothing else."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from torch.distributed import HashStore, Store

from aiorpc.errors import RendezvousError
from aiorpc.protocol.identity import WorkerRecord
from aiorpc.runtime.engine.host import host_identity
from aiorpc.runtime.meeting.rendezvous import Rendezvous

SOON = 0.05


@pytest.fixture(autouse=True)
def no_secret_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user's environment holds does not decide these tests."""
    monkeypatch.delenv("AIORPC_SECRET", raising=False)


def record(number: int) -> WorkerRecord:
    """Of a worker of this process."""
    host = host_identity()
    return WorkerRecord(f"w{number}", number, secrets.token_hex(16), host, "n", os.getpid(), "m", "", "127.0.0.1", 0)


MEMBER = json.dumps([record(0).to_wire(), False, False, [0, "cuda", [], {}], ""])
RUBBISH = [
    b"\xff\xfe",
    b"[",
    b"null",
    b"5",
    b"-1",
    b"1.5",
    b"[]",
    b"{}",
    b"[1]",
    b'"x"',
    b"[" * 5_000,
    b"9" * 5_000,
    b"99999999999999999",
    b"[1e999, null]",
    b'[["x"], {}]',
    b'["complete", "", 0, "", 0]',
    b'["complete", null, "0", "", 0]',
    b'["abort", "", 1e999, "", -1]',
    b'["odd", "", 0, "", 0]',
    b'[2, "somebody"]',
    b'[1000000000, "somebody"]',
    b'{"version": "x", "members": [], "used": [], "left": []}',
    b'{"version": 1, "members": 5, "used": [], "left": []}',
    b'{"version": 1, "members": [], "used": [[]], "left": []}',
    b'{"version": 1, "members": [], "used": [], "left": [5]}',
    b'{"version": 1, "members": [], "used": [], "left": "x"}',
    b'{"version": 1, "members": [[]], "used": [], "left": []}',
    b'{"owner": 5}',
    b'{"owner": "x", "value": "no digits"}',
    MEMBER.encode(),
    MEMBER.replace('"n"', '"\\ud800"').encode(),
    MEMBER.replace('""]', '"\\ud800"]').encode(),
    MEMBER.replace(str(os.getpid()), "4294967295").encode(),
]
FIXED = ["generation", "last/0", "1/world", "1/slot/0", "1/slot/1", "1/end/0", "1/verdict", "1/done"]
FREE = ["generation", "1/world", "1/slot/0", "1/ids", "1/roster"]
SECRET = ["salt", "1/secret", "1/roster", "1/slot/0", "1/verdict"]


def outcome(step: Callable[[], object]) -> str:
    """What a step raises, "" for nothing; only RendezvousError may come."""
    try:
        step()
    except RendezvousError as error:
        return str(error)
    return ""


def join(store: Store, size: int | None, folder: Path, spoil: Callable[[], None] = lambda: None) -> list[str]:
    """What comes of a whole life: joining, agreeing on a secret, looking, leaving. spoil: called once it has joined."""
    opened = Rendezvous.open("env://", rank=None if size is None else 0, world_size=size, timeout=SOON, store=store)
    made = record(0)
    said = [outcome(lambda: opened.join(lambda _: made))]
    if not said[0]:
        spoil()
        said.append(outcome(lambda: opened.agree_secret(made, folder)))
        said.append(outcome(opened.serve_joining))
        said.append(outcome(opened.members))
        said.append(outcome(lambda: opened.find("w9", 2.0)))
        said.append(outcome(lambda: opened.leave(made)))
    said.append(outcome(opened.abandon))
    said.append(outcome(opened.close))
    return said


def put(store: Store, key: str, value: bytes) -> None:
    """Write bytes, which torch's stubs do not know of."""
    store.set(f"aiorpc/{key}", value)  # type: ignore[arg-type]  # see above


@pytest.mark.parametrize("key", FREE)
def test_rubbish_in_a_free_group(key: str, tmp_path: Path) -> None:
    """Under each key that joining reads: an error of the documented kind."""
    there = {"generation": "1", "1/world": '[1, "somebody"]'} if key in ("1/world", "1/slot/0") else {}
    raised = [any(join(_with(key, value, **there), None, tmp_path)) for value in RUBBISH]
    assert any(raised), "nobody has looked at it"


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("key", FIXED)
def test_rubbish_in_a_fixed_group(size: int, key: str, tmp_path: Path) -> None:
    """The same, whether all have come or not."""
    raised = [any(join(_with(key, value), size, tmp_path)) for value in RUBBISH]
    assert any(raised) or key == "1/slot/1", "nobody has looked at it"


def test_rubbish_for_a_salt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With AIORPC_SECRET."""
    monkeypatch.setenv("AIORPC_SECRET", "long enough, and random")
    assert all(any(join(_with("salt", value), size, tmp_path)) for value in RUBBISH for size in (1, None))


def _with(key: str, value: bytes, **there: str) -> Store:
    store = HashStore()
    for other, text in there.items():
        store.set(f"aiorpc/{other}", text)
    put(store, key, value)
    return store


@pytest.mark.parametrize("size", [1, None])
@pytest.mark.parametrize("key", SECRET)
def test_rubbish_that_comes_later(size: int | None, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the worker has joined: what it does at the store then fails in the same way."""
    for value in RUBBISH:
        store = HashStore()
        join(store, size, tmp_path, partial(put, store, key, value))


def test_the_error_says_where_and_who(tmp_path: Path) -> None:
    """The place, the key, and who can write there."""
    store = HashStore()
    store.set("aiorpc/generation", "rubbish")
    said, *_ = join(store, 1, tmp_path)
    assert "holds no number under aiorpc/generation, which no worker has written" in said
    assert "Everyone who reaches that store can write there" in said and "but not join it" in said
