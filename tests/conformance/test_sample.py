"""A tenth of PyTorch's RPC tests, on aiorpc: each ends as the table says. All of them: ``make conformance``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from . import table
from .processes import Outcome

ROOT = Path(__file__).parents[2]
KNOWN = table.read()
# Seconds for all of them on two cores that have other things to do as well.
LIMIT = 540
PATIENCE = 5  # seconds, for ending them

pytestmark = [
    pytest.mark.long,
    pytest.mark.time_limit(LIMIT + 10),  # the first of them waits for all
    pytest.mark.skipif(
        not KNOWN.here(torch.__version__),
        reason=f"the table of results is about torch {KNOWN.torch}, not {torch.__version__}; see README.md",
    ),
]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Outcome]]:
    """How each test went that was asked for, from one process that runs them two at a time."""
    folder = tmp_path_factory.mktemp("conformance")
    chosen, found = folder / "tests", folder / "outcomes"
    specs = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = [spec.params.get("id") for spec in specs if spec is not None]
    chosen.write_text("\n".join(id for id in wanted if id in KNOWN.rows))
    command = [sys.executable, "-m", "tests.conformance", "--jobs", "2", "--tests", str(chosen)]
    command += ["--outcomes", str(found), "--logs", str(folder / "logs")]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    code, output, errors = _run(command, {**os.environ, "PYTHONPATH": path})
    lines = found.read_text().splitlines() if found.exists() else []
    assert lines, f"nothing was run (exit code {code}):\n{output[-2000:]}\n{errors[-4000:]}"
    yield {outcome.id: outcome for outcome in (Outcome(**json.loads(line)) for line in lines)}


def _run(command: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True) as runner:
        try:
            output, errors = runner.communicate(timeout=LIMIT)
        except BaseException:
            runner.send_signal(signal.SIGINT)  # it ends its tests, whose sessions are their own
            try:
                runner.wait(PATIENCE)
            finally:
                runner.kill()
            raise
    return runner.returncode, output, errors


@pytest.mark.parametrize("id", table.read_sample())
def test_ends_as_the_table_says(id: str, outcomes: dict[str, Outcome]) -> None:
    """Passes if it passed when the table was made; a test that has come to pass has to be entered there."""
    expected, outcome = KNOWN.rows[id].result, outcomes[id]
    assert outcome.result == expected, (
        f"the table says {expected}, now it is {outcome.result}: {outcome.detail[-3000:]}\n"
        "(python -m tests.conformance --help; --update writes the table)"
    )
