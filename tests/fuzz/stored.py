"""The targets of the rendezvous store: what workers read there, whoever has written it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed import HashStore

from aiorpc.errors import RendezvousError
from aiorpc.protocol.identity import WorkerRecord
from aiorpc.runtime.engine.host import host_identity
from aiorpc.runtime.meeting.key_value import KeyValueClient
from aiorpc.runtime.meeting.membership import Member
from aiorpc.runtime.meeting.rendezvous import Rendezvous
from tests.fuzz.trap import nothing_unpickled

RECORD = WorkerRecord("worker", 3, "ab" * 16, "host:1:1", "name", 17, "main", "/run/x.sock", "127.0.0.1", 1)
SECRET = bytes(32)
SOON = 0.001  # seconds that a worker waits for others, which never come
BOARD = KeyValueClient(HashStore(), "the place of a test")
# What each of them is read as is in `runtime/meeting`; those of both kinds of group, and of the secret.
KEYS = (
    *("generation", "last/0", "1/world", "1/slot/0", "1/slot/1", "1/end/0", "1/verdict", "1/done"),
    *("1/ids", "1/roster", "1/secret", "1/secret/read", "1/secret/value", "salt"),
)
_LATE, _FREE = 64, 128  # in the first byte: it is written once the worker has joined; the group is free


def taste_records(data: bytes) -> None:
    """The text that stands under a key of the store where a member ought to be."""
    member = BOARD.load("1/slot/0", data.decode("utf-8", "replace"), Member.from_json)
    member.check(SECRET, 1)


def seeds_of_records() -> list[bytes]:
    """A member with and without a seal, lists that are none, and JSON that nobody writes."""
    member = Member(RECORD, own_secret=True)
    claims = [1, "cuda", ["cuda:0"], {"w1": {"cuda:0": "cuda:1"}}]
    texts = [json.dumps(each.to_json()) for each in (member, member.sealed(SECRET, 1), Member(RECORD))]
    texts.append(json.dumps([RECORD.to_wire(), True, claims, "", None, True]))
    odd = ("[1, 2, 3, 4, 5]", "{}", "[NaN, Infinity]", '"\\ud800"', "[" * 2000, "1" * 5000)
    return [text.encode() for text in (*texts, *odd)]


@contextmanager
def lives() -> Iterator[Callable[[bytes], None]]:
    """Whole lives of a worker alone at a store where somebody has written. The first byte says under which key."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / f"aiorpc-{os.getuid()}"
        folder.mkdir(mode=0o700)

        def taste(data: bytes) -> None:
            if data:
                live(data[0], data[1:], folder)

        with nothing_unpickled():
            yield taste


def live(how: int, value: bytes, folder: Path) -> None:
    """Join, agree on a secret, look, leave. Raises what that raises; the end comes in any case."""
    store = HashStore()
    key = f"aiorpc/{KEYS[how % len(KEYS) if how < _LATE else (how & 63) % len(KEYS)]}"

    def spoil() -> None:
        store.set(key, value)  # type: ignore[arg-type]  # torch's stubs do not know that it takes bytes

    free = bool(how & _FREE)
    if not how & _LATE:
        spoil()
    mine = replace(RECORD, id=0, host=host_identity(), pid=os.getpid(), unix_path="")
    opened = Rendezvous.open(
        "env://", rank=None if free else 0, world_size=None if free else 1, timeout=SOON, store=store
    )
    try:
        opened.join(lambda number: mine)
        if how & _LATE:
            spoil()
        opened.agree_secret(mine, folder)
        opened.serve_joining()
        opened.members()
        opened.leave(mine)
    finally:
        for step in (opened.abandon, opened.close):
            with suppress(RendezvousError):
                step()


def seeds_of_lives() -> list[bytes]:
    """What honest workers write under each key, before and after the worker has joined, in both kinds of group."""
    member = Member(replace(RECORD, host=host_identity(), pid=os.getpid())).to_json()
    texts: dict[str, list[Any]] = {
        "generation": [1, 7],
        "last/0": [1],
        "1/world": [[1, "somebody"], [2, "somebody"]],
        "1/slot/0": [member],
        "1/slot/1": [member],
        "1/verdict": [[kind, "why", 1.5, "host", 17] for kind in ("complete", "abort", "void", "timeout")],
        "1/roster": [
            {"version": 1, "members": [member], "used": [1, 2], "left": ["x"]},
            {"version": 2, "members": [], "used": [], "left": []},
        ],
        "1/secret": ["ab" * 8],
        "1/ids": [3],
        "1/done": [1],
    }
    made = []
    for key, values in texts.items():
        for how in (0, _LATE, _FREE, _LATE | _FREE):
            made += [bytes((KEYS.index(key) | how,)) + json.dumps(value).encode() for value in values]
    made += [bytes((KEYS.index(key),)) + RECORD.incarnation.encode() for key in ("1/end/0", "1/secret/value")]
    return made
