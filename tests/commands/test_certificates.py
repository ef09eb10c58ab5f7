"""``python -m aiorpc certificates``: what it makes can be used, is private where it has to be, and can be renewed."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from aiorpc.__main__ import main
from aiorpc.options import Tls
from aiorpc.transport.certificates import Credentials


def test_what_it_makes_can_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For workers, for patterns and for roles; it prints where they are."""
    folder = tmp_path / "certs"
    assert main(["certificates", str(folder), "w0,role:ps", "actor-*", "role:learner"]) == 0
    printed = [Path(line).name for line in capsys.readouterr().out.splitlines()]
    assert printed == ["ca.pem", "w0.pem", "actor-_.pem", "role_learner.pem"]
    for stem, name, role in (("w0", "w0", "ps"), ("actor-_", "actor-7", ""), ("role_learner", "anybody", "learner")):
        Credentials(Tls(folder / f"{stem}.pem", folder / f"{stem}.key", folder / "ca.pem"), name, role)
    keys = list(folder.glob("*.key"))
    assert len(keys) == 4
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_authority_stays(tmp_path: Path) -> None:
    """Once more for another worker: those that are there go on."""
    main(["certificates", str(tmp_path), "w0"])
    before = (tmp_path / "ca.pem").read_bytes()
    main(["certificates", str(tmp_path), "w1", "--days", "1"])
    assert (tmp_path / "ca.pem").read_bytes() == before
    Credentials(Tls(tmp_path / "w0.pem", tmp_path / "w0.key", tmp_path / "ca.pem"), "w0")


@pytest.mark.parametrize("name", ["../w0", "a/b", "ca", ""])
def test_names_that_are_none_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Nothing is written outside of the folder, nor over the authority."""
    assert main(["certificates", str(tmp_path / "in"), name]) == 1
    assert "is no name that a file can have" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_rubbish_in_place_of_the_authority_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is not replaced: others may use it."""
    for name in ("ca.pem", "ca.key"):
        (tmp_path / name).write_text("rubbish")
    assert main(["certificates", str(tmp_path), "w0"]) == 1
    assert "are no authority" in capsys.readouterr().err
    assert (tmp_path / "ca.pem").read_text() == "rubbish"
