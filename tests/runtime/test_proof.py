"""By what members know each other: a secret of the environment or of a file, or certificates; all by the same."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from torch.distributed import HashStore

from aiorpc.errors import RendezvousError
from aiorpc.runtime.meeting.rendezvous import MeetingOptions, Rendezvous
from aiorpc.runtime.meeting.secret import CERTIFIED, given_secret

from .test_rendezvous import ELSEWHERE, LONG, PATIENCE, make_record, together


@pytest.fixture(autouse=True)
def no_secret_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user's environment holds does not decide these tests."""
    monkeypatch.delenv("AIORPC_SECRET", raising=False)
    monkeypatch.delenv("AIORPC_SECRET_FILE", raising=False)


@pytest.fixture
def store() -> Iterator[HashStore]:
    yield HashStore()


def meet(
    store: HashStore,
    folder: Path,
    asked: Sequence[tuple[bool | None, bool]],
    size: int | None = 2,
    timeout: float = PATIENCE,
) -> list[bytes | Exception]:
    """Two workers that meet, the second one from another host: the key of each, or its error.

    asked: require_secret of each, and whether it takes certificates.
    """

    def worker(rank: int) -> bytes:
        own = folder / str(rank)
        own.mkdir(mode=0o700, exist_ok=True)
        required, certificates = asked[rank]
        opened = Rendezvous.open(
            "env://",
            rank=None if size is None else rank,
            world_size=size,
            timeout=timeout,
            store=store,
            options=MeetingOptions(require_secret=required, certificates=certificates),
        )
        with closing(opened):
            host = ELSEWHERE if rank else ""
            records = opened.join(lambda number: make_record(f"w{rank}", number, host=host))
            own_record = next(record for record in records if record.name == f"w{rank}")
            return opened.agree_secret(own_record, own)

    if size is not None:
        return together(*(lambda rank=rank: worker(rank) for rank in range(2)))
    return [*together(lambda: worker(0)), *together(lambda: worker(1))]


@pytest.mark.parametrize("required", [None, False])
@pytest.mark.parametrize("size", [2, None])
def test_certificates_stand_in_for_a_secret(
    store: HashStore, tmp_path: Path, size: int | None, required: bool | None
) -> None:
    """On several hosts: all have the same, which is no secret; neither the store nor a file has one."""
    assert meet(store, tmp_path, [(required, True)] * 2, size) == [CERTIFIED] * 2
    assert not store.check(["aiorpc/1/secret"]) and not list(tmp_path.glob("*/*"))


def test_with_a_secret_certificates_are_not_enough(
    store: HashStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has set AIORPC_SECRET too wants both."""
    monkeypatch.setenv("AIORPC_SECRET", LONG)
    first, second = meet(store, tmp_path, [(None, True)] * 2)
    assert isinstance(first, bytes) and first == second != CERTIFIED


def test_certificates_for_some_members_only_are_an_error_for_all(store: HashStore, tmp_path: Path) -> None:
    """It would else be a refused handshake at the first call."""
    for error in meet(store, tmp_path, [(None, True), (None, False)]):
        assert isinstance(error, RendezvousError)
        assert re.search(r"^w0 .* know members by their certificates alone, w1 .* do not", str(error))


@pytest.mark.parametrize("size", [2, None])
def test_different_demands_for_a_secret_are_said_at_joining(store: HashStore, tmp_path: Path, size: int | None) -> None:
    """On several hosts, with both sides named; the same error for all who learn of it."""
    results = meet(store, tmp_path, [(False, False), (None, False)], size)
    for error in results if size is not None else results[1:]:  # the first of a free group was alone
        assert isinstance(error, RendezvousError)
        assert re.search(r"w0 \(.*\) have require_secret=False, w1 \(.*\) have not", str(error))


def test_who_requires_a_secret_and_has_none_is_named_to_all(store: HashStore, tmp_path: Path) -> None:
    """The others are told at once by whom they would have to wait for, and why."""
    results = meet(store, tmp_path, [(None, False), (True, False)])
    for error in results:
        assert isinstance(error, RendezvousError)
        assert re.search(r"AIORPC_SECRET is not set, and w1 \(.*\) has require_secret=True: set AIORPC", str(error))


# ---- files


def written(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_file_holds_what_the_variable_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given by the option, or named by AIORPC_SECRET_FILE; the line may end. Links are followed."""
    path = written(tmp_path / "secret", LONG.encode() + b"\n")
    assert given_secret(path) == LONG.encode()
    (tmp_path / "link").symlink_to(path)
    monkeypatch.setenv("AIORPC_SECRET_FILE", str(tmp_path / "link"))
    assert given_secret() == LONG.encode()
    assert given_secret(written(tmp_path / "other", b"another one, and long")) == b"another one, and long"


@pytest.mark.parametrize(
    ("content", "mode", "text"),
    [
        (LONG.encode(), 0o660, "others than this user can read or write the secret's file"),
        (LONG.encode(), 0o602, "others than this user can read or write the secret's file"),
        (b" \n", 0o600, "is set, and empty"),
        (b"fifteen letters\n", 0o600, "has 15 bytes"),
        (None, 0, "cannot be read: .*No such file"),
    ],
)
def test_a_file_that_keeps_no_secret_is_refused(tmp_path: Path, content: bytes | None, mode: int, text: str) -> None:
    """Its mode and what stands there are looked at; the error names the file and not what is in it."""
    path = tmp_path / "secret" if content is None else written(tmp_path / "secret", content, mode)
    with pytest.raises(RendezvousError, match=text) as caught:
        given_secret(path)
    assert str(path) in str(caught.value) and LONG not in str(caught.value)


def test_a_directory_or_a_pipe_is_no_file_of_a_secret(tmp_path: Path) -> None:
    """And nobody waits for one who might write into it."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(RendezvousError, match="the secret's file"):
            given_secret(path)


def test_a_secret_that_is_given_twice_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may differ, and nobody would see which one is used."""
    monkeypatch.setenv("AIORPC_SECRET", LONG)
    with pytest.raises(RendezvousError, match="is given twice, by AIORPC_SECRET and by a file"):
        given_secret(written(tmp_path / "secret", LONG.encode()))
