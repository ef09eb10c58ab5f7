"""SECURITY.md claims what tests show: each test that it names exists, and each claim that holds names one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "SECURITY.md").read_text()
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)))
ATTACKERS = [
    "A stranger on the network",
    "Another user of the host",
    "An attacker that can write to the store",
    "A bad member",
    "A stolen certificate",
]


def rows(attacker: str) -> list[list[str]]:
    """The cells of the table about that attacker, without its head."""
    section = TEXT.partition(f"\n### {attacker}\n")[2].partition("\n##")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


@pytest.mark.parametrize(("path", "name"), TESTS)
def test_a_test_that_is_named_exists(path: str, name: str) -> None:
    """Under that name, in that file."""
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("attacker", ATTACKERS)
def test_each_claim_that_holds_names_a_test(attacker: str) -> None:
    """And what does not hold is said of each attacker."""
    found = rows(attacker)
    assert any("**no**" in row[1] for row in found)
    for row in found:
        plain = row[1].startswith("yes") and "**no**" not in row[1]
        assert not plain or (len(row) == 3 and "::" in row[2]), row
