"""Types that msgspec has compiled can be read in any thread."""

from __future__ import annotations

import subprocess
import sys

# Two workers of a process that join at once read the list of the group, each in a thread of its own.
PROGRAM = """
import sys
import threading
from dataclasses import make_dataclass
from typing import Annotated

import msgspec

from aiorpc.protocol.packing import compiled

def read():
    together.wait()
    msgspec.convert(values, declared)

sys.setswitchinterval(1e-6)
values = {f"f{place}": place for place in range(8)}
for number in range(600):
    bounded = Annotated[int, msgspec.Meta(ge=0, le=2**31 + number)]
    declared = compiled(make_dataclass("Record", [(name, bounded) for name in values]))
    together = threading.Barrier(2)
    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_two_threads_may_read_a_type_for_the_first_time_at_once() -> None:
    """Without `compiled` the process crashes."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
