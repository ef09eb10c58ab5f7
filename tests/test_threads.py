"""Threads of the runtime, and the context variables of whoever starts them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.examples.programs import run_program

PROGRAM = """
import contextvars
import aiorpc
from aiorpc.testing import blocking_cluster

user = contextvars.ContextVar("user", default="nobody")

def outer():
    user.set("somebody")  # and the nested call starts another thread
    return aiorpc.rpc_sync("worker0", user.get)

with blocking_cluster(1) as (worker,):
    print(worker.call("worker0", outer).wait())
"""


@pytest.mark.skipif(sys.version_info < (3, 14), reason="threads inherit nothing until Python 3.14")
def test_a_thread_has_no_context_variables_of_who_starts_it(tmp_path: Path) -> None:
    """Whatever the interpreter is told: what one caller's handler has set is not there in the calls of others."""
    done = run_program(["-X", "thread_inherit_context=1", "-c", PROGRAM], tmp_path, timeout=60)
    assert (done.out, done.err) == ("nobody\n", "")
