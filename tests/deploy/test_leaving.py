"""Workers that are process 1 of a pod: asked to go by SIGTERM, and looked at by probes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.processes.workers import wait_for

from .pods import LIMIT, SECRET, cluster
from .test_pods import MEMBER

MEET = {**SECRET, "MEET": "tcp://inference-0.inference.default:29500"}
PROBE = ["python", "-m", "aiorpc", "probe", "model"]

pytestmark = pytest.mark.slow


def test_process_1_answers_what_it_has_accepted_and_ends(tmp_path: Path) -> None:
    """With the status of the signal, as its program goes on. The kernel ignores that signal for process 1 without a
    handler, so the worker has to end the process in another way than by the signal."""
    with cluster(tmp_path, 2) as made:
        asks = made.start("inference-0", "inference", [*MEMBER, "asks"], MEET)
        model = made.start("inference-0-1", "inference", [*MEMBER, "model"], MEET)
        asks.wait_for("under way")
        model.send(signal.SIGTERM)
        asks.wait_for("answered: 20")
        assert model.end(60.0) == 128 + signal.SIGTERM
        assert asks.end() == 0


def test_probes_run_in_the_pod(tmp_path: Path) -> None:
    """They fail before the worker has joined, and succeed then."""
    with cluster(tmp_path, 1) as made:
        pod = made.start("inference-0", "inference", [*MEMBER, "model"], MEET)
        env = made.variables()  # of the pod: its files for temporary things are those of the worker
        env["TMPDIR"] = str(tmp_path / "tmp0")
        assert pod.run(PROBE, env).returncode == 1
        pod.wait_for("serves")
        wait_for(lambda: pod.run(PROBE, env).returncode == 0, LIMIT)
        wait_for(lambda: pod.run([*PROBE, "--ready"], env).returncode == 0, LIMIT)
