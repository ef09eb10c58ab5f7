"""The inputs that are kept: for each target a file with one input to the line, in hexadecimal digits.

`corpus/` has inputs that reach different parts of a target, as few and as short as do; `findings/` has what was once
found, each with a comment that says what went wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

CORPUS, FINDINGS = Path(__file__).parent / "corpus", Path(__file__).parent / "findings"
MOST, LONGEST = 60, 600  # inputs of a corpus, and bytes of each


def read(folder: Path, name: str) -> list[bytes]:
    """The inputs of a target; none if it has no file."""
    path = folder / f"{name}.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [bytes.fromhex(line) for line in lines if not line.startswith("#")]


def write(folder: Path, name: str, inputs: Iterable[bytes], about: str) -> None:
    """Keep these inputs, the shortest first."""
    folder.mkdir(exist_ok=True)
    kept = sorted({data for data in inputs if len(data) <= LONGEST}, key=lambda data: (len(data), data))[:MOST]
    (folder / f"{name}.txt").write_text("\n".join((f"# {about}", *(data.hex() for data in kept))) + "\n")
