"""``python -m aiorpc certificates``: what it makes can be used, is private where it has to be, and can be renewed."""

from __future__ import annotations

import datetime
import re
import stat
from pathlib import Path

import pytest

from aiorpc.__main__ import main
from aiorpc.commands.certificates import make
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


def test_an_authority_that_ends_too_soon_makes_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it signs is good for nothing behind that; the error says what to do. Nothing that is there is touched."""
    begun = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=20)
    make(tmp_path, ["w0"], start=begun)
    assert main(["certificates", str(tmp_path), "w1"]) == 0
    capsys.readouterr()
    before = (tmp_path / "w1.pem").read_bytes()
    assert main(["certificates", str(tmp_path), "w1", "w2", "--days", "365"]) == 1
    said = capsys.readouterr().err
    assert re.search(r"ca.pem is good until \d.* give --days (39|40) at most, or make a new authority", said)
    assert (tmp_path / "w1.pem").read_bytes() == before and not (tmp_path / "w2.pem").exists()
    make(tmp_path / "old", ["w0"], days=1, start=begun)
    assert main(["certificates", str(tmp_path / "old"), "w0", "--days", "1"]) == 1
    assert re.search(r"were asked for: make a new authority", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["w0", "--days", "-5"], "certificates have to be good for some days, and not for -5"),
        (["w0", "--days", "0"], "certificates have to be good for some days, and not for 0"),
        (["w0", "--days", "9999999"], "there is no date that is 9999999 days from now"),
        (["w0", "--days", "9999999999999"], "there is no date that is 9999999999999 days from now"),
        (["w0", "w\xf6rker"], "'w\xf6rker' is no name of a worker"),
        (["w0,role:l\xf6rner"], "'w0,role:l\xf6rner' is no name of a worker"),
        (["a b"], "'a b' is no name of a worker: use ASCII letters and digits, -, _ and :"),
        (["host.example"], "'host.example' is no name of a worker"),
        (["role:"], "'role:' is no name of a worker"),
        (["role:actor*"], "'role:actor*' is no name of a worker"),
        (["w" * 128], f"'{'w' * 128}' is no name of a worker"),
        (["ps:0", "ps_0"], "'ps:0' and 'ps_0' would both be ps_0.pem"),
        (["w,role:a", "w,role:b"], "'w,role:a' and 'w,role:b' would both be w.pem"),
    ],
)
def test_what_cannot_be_made_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    """In one line, and nothing is written: not the others that were asked for, nor an authority."""
    assert main(["certificates", str(tmp_path), *arguments]) == 1
    assert re.fullmatch(rf"python -m aiorpc certificates: {re.escape(text)}.*\n", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["../w0", "a/b", "ca", "", "w0,"])
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


def test_the_key_of_another_authority_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it would sign, nobody would take who has the certificate."""
    make(tmp_path / "a", ["w0"])
    make(tmp_path / "b", ["w0"])
    (tmp_path / "a" / "ca.key").write_bytes((tmp_path / "b" / "ca.key").read_bytes())
    assert main(["certificates", str(tmp_path / "a"), "w1"]) == 1
    assert "are no authority: each is of another one" in capsys.readouterr().err
    assert not (tmp_path / "a" / "w1.pem").exists()
