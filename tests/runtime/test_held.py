"""The file with the secret that the members of a group have made themselves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aiorpc.runtime.meeting.held import HeldSecret
from tests.leaks import open_descriptors

from .test_rendezvous import make_record

TRIES = 50


def test_many_may_be_let_in_at_once(tmp_path: Path) -> None:
    """Each by a thread of its own that finds no file yet: one of them writes it, and it is let go of."""
    before = open_descriptors()
    with ThreadPoolExecutor(4) as pool:
        for number in range(TRIES):
            held = HeldSecret(make_record(f"w{number}", number), tmp_path)
            offers = [pool.submit(held.offer, False) for _ in range(4)]
            assert len({each.result()["path"] for each in offers}) == 1
            held.remove()
    assert open_descriptors() == before
    assert not list(tmp_path.iterdir())
