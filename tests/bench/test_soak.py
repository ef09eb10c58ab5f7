"""``python -m bench.soak``: what it calls growth, and a run of some seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.test_command import run_module


@pytest.mark.long
@pytest.mark.slow
def test_a_short_run_works_from_start_to_files(tmp_path: Path) -> None:
    """All kinds of work are done by all kinds of members; whether something grows cannot be told in seconds."""
    done = run_module("bench.soak", "--minutes", "0.4", "--out", str(tmp_path / "soak"), timeout=230)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["work"]["failed"] == {}, found["errors"]
    assert {"hub", "near", "far", "cut", "returning", "store"} == {*found["members"]}
    assert all(series["time"] for series in found["members"].values())
    assert (tmp_path / "soak.png").stat().st_size > 10_000
