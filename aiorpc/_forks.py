"""What a process shares with the children that it forks later: made when the package is imported."""

from __future__ import annotations

import os

#: Of this process and of the children forked from it, which have the same interactive main.
FAMILY = os.urandom(16).hex()
