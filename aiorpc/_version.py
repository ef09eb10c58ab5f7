"""The version of aiorpc: the only place where it stands. The build, records of workers and the documents read it."""

from __future__ import annotations

__version__ = "0.1.0"
