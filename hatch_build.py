"""The README as the package index shows it: its links lead to the repository, at the tag of the release."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PROJECT = "aiorpc/aiorpc"


def with_absolute_links(text: str, version: str) -> str:
    """Pictures are read from the tag's files, and all other files of the repository are shown at the tag."""
    pages = f"https://github.com/{PROJECT}/blob/v{version}/"
    files = f"https://raw.githubusercontent.com/{PROJECT}/v{version}/"
    local = r"(?![a-z]+:|#)"
    text = re.sub(rf'(!\[[^\]]*\]\(|<img [^>]*?src="){local}', rf"\1{files}", text)
    return re.sub(rf"(?<=\]\(){local}", pages, text)


class CustomMetadataHook(MetadataHookInterface):
    """Run by hatchling as it builds."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the field `readme`, which pyproject.toml declares as dynamic."""
        root = Path(self.root)
        (version,) = re.findall(r'^__version__ = "(.+)"$', (root / "aiorpc" / "_version.py").read_text(), re.MULTILINE)
        text = with_absolute_links((root / "README.md").read_text(encoding="utf-8"), version)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
