"""What stands in the way of a release is found before the tag is pushed."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiorpc import __version__
from tools.release import problems, version

ROOT = Path(__file__).resolve().parents[2]
CHANGELOG = """# Changelog

## [Unreleased]

## [1.2.3] - 2026-12-01

- a line

## [1.2.2] - 2026-11-01

- old
"""
WAITING = CHANGELOG.replace("## [Unreleased]\n", "## [Unreleased]\n\n- new\n")


def test_the_changelog_describes_this_version() -> None:
    """The checkout could be released: its version has an entry."""
    assert version((ROOT / "aiorpc" / "_version.py").read_text()) == __version__
    assert problems(__version__, (ROOT / "CHANGELOG.md").read_text()) == []


def test_a_release_in_order_has_no_problem() -> None:
    """Tag, version and the dated entry agree, and nothing is left under [Unreleased]."""
    assert problems("1.2.3", CHANGELOG, "v1.2.3") == []


@pytest.mark.parametrize(
    ("released", "changelog", "tag", "told"),
    [
        ("1.2.3", CHANGELOG, "v1.2.4", "the tag has to be v1.2.3"),
        ("1.2.3", CHANGELOG, "1.2.3", "the tag has to be v1.2.3"),
        ("1.2.4", CHANGELOG, "", "says nothing under a heading `## [1.2.4]"),
        ("1.2.3", CHANGELOG.replace("- a line\n", ""), "", "says nothing under a heading"),
        ("1.2.3", CHANGELOG.replace("2026-12-01", "soon"), "v1.2.3", "gives no date"),
        ("1.2.3", WAITING, "v1.2.3", "move them to [1.2.3]"),
        ("one", CHANGELOG.replace("1.2.3", "one"), "", "is no version"),
    ],
)
def test_what_stands_in_the_way_is_told(released: str, changelog: str, tag: str, told: str) -> None:
    """One sentence for each, which says what to do."""
    (found,) = problems(released, changelog, tag)
    assert told in found


def test_lines_that_wait_for_a_release_are_no_problem_without_a_tag() -> None:
    """Between releases [Unreleased] fills."""
    assert problems("1.2.3", WAITING) == []


def test_a_version_that_is_missing_is_an_error() -> None:
    """A file without one is not read as having an empty one."""
    with pytest.raises(ValueError, match="has no version"):
        version("__version__ = make()\n")
