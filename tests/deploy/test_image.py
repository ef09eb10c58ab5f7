"""The Containerfile copies what is there, installs what pyproject.toml says, and runs nothing as root."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Containerfile, and their arguments."""
    text = (ROOT / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def given(word: str) -> list[str]:
    """The arguments of all instructions of that name."""
    return [rest for name, rest in instructions() if name == word]


def project() -> dict[str, Any]:
    """Of pyproject.toml."""
    made: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return made


def test_what_is_copied_is_there() -> None:
    """It is in the repository, and no rule of .dockerignore keeps it out."""
    sources = [source for rest in given("COPY") for source in rest.split()[:-1]]
    assert [source for source in sources if not (ROOT / source).exists()] == []
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert rules[0] == "**" and {rule[2:] for rule in rules if rule.startswith("!/")} == {
        source.removeprefix("./") for source in sources
    }


def test_what_the_build_reads_is_copied() -> None:
    """What pyproject.toml and hatch_build.py name as needed for the wheel."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [included] = re.findall(r"^only-include = \[(.+)\]$", text, re.MULTILINE)
    needed = {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", *re.findall(r'"(.+?)"', included)}
    assert needed <= {source for rest in given("COPY") for source in rest.split()[:-1]}


def test_what_is_installed_is_what_the_project_asks_for() -> None:
    """torch within its bounds, and extras that exist."""
    runs = " ".join(given("RUN"))
    [torch] = re.findall(r'"(torch[^"]*)"', runs)
    assert torch in project()["dependencies"]
    [extras] = re.findall(r"/src\[(.+?)\]", runs)
    assert set(extras.split(",")) <= set(project()["optional-dependencies"])


def test_the_python_is_one_that_the_project_admits() -> None:
    """The tag of the image that it begins with."""
    [version] = re.findall(r"python:(\d\.\d+)", " ".join(given("ARG")))
    assert f"Programming Language :: Python :: {version}" in project()["classifiers"]


def test_workers_do_not_run_as_root_nor_behind_a_shell() -> None:
    """The last user is a number that is not root's; what a manifest runs is process 1 itself."""
    *_, user = given("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    assert given("ENTRYPOINT") == given("CMD") == []
