"""The version of aiorpc. The build, records of workers and the documents read it from here."""

from __future__ import annotations

__version__ = "0.1.0"
