"""Certificates for tests, made once for each folder that asks for some."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from aiorpc.commands.certificates import make
from aiorpc.options import Tls


class Authority:
    """A folder with an authority of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make(folder, ["w0"])

    def tls(self, name: str, *, of: str = "", **options: Any) -> Tls:
        """The files of a worker: a certificate of that name, or `of`, good or not as the options of `make` say."""
        self.make(of or name, **options)
        stem = (of or name).replace("*", "_").replace(":", "_")
        return Tls(self.folder / f"{stem}.pem", self.folder / f"{stem}.key", self.folder / "ca.pem")

    def make(self, name: str, *, days: float = 30, ago: float = 1 / 24) -> None:
        """Make a certificate anew. ago: since how many days it is good."""
        start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=ago)
        make(self.folder, [name], days=days, start=start)
