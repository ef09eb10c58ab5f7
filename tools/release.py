"""``python -m tools.release [TAG]``: whether the version and the changelog are those of a release.

TAG: the tag that is to be released, like ``v0.1.0``. With it, no line may be left under [Unreleased].
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def version(source: str) -> str:
    """The version that ``aiorpc/_version.py`` has; ValueError if there is none."""
    found = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    if found is None:
        raise ValueError("aiorpc/_version.py has no version")
    return found[1]


def problems(released: str, changelog: str, tag: str = "") -> list[str]:
    """What stands in the way of releasing that version; one sentence each."""
    found = []
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", released):
        found.append(f"{released} is no version like 1.2.3 or 1.2.3rc1")
    if tag and tag != f"v{released}":
        found.append(f"the tag is {tag}, but the version is {released}: the tag has to be v{released}")
    entries: dict[str, tuple[str, str]] = {}
    for heading, rest, text in re.findall(r"^## \[(.+?)\](.*)\n((?:(?!## ).*\n?)*)", changelog, re.MULTILINE):
        entries[heading] = rest.strip(), text.strip()
    date, text = entries.get(released, ("", ""))
    if not text:
        found.append(f"CHANGELOG.md says nothing under a heading `## [{released}] - YYYY-MM-DD`")
    if tag and not re.fullmatch(r"- \d{4}-\d\d-\d\d", date):
        found.append(f"CHANGELOG.md gives no date behind `## [{released}]`, but {date or 'nothing'!r}")
    if tag and entries.get("Unreleased", ("", ""))[1]:
        found.append(f"CHANGELOG.md has lines under [Unreleased]: move them to [{released}]")
    return found


def main(arguments: Sequence[str]) -> int:
    """Say what stands in the way; the exit status, 1 if anything does."""
    released = version((ROOT / "aiorpc" / "_version.py").read_text())
    found = problems(released, (ROOT / "CHANGELOG.md").read_text(), *arguments)
    print("\n".join(found) or f"version {released}: the changelog has an entry for it")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
