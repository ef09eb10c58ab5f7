"""cuda_rpc, small: the CPU part as its users run it; both ways where there is a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aiorpc.examples import cuda_rpc
from tests.examples.programs import is_png, matches, run_all, run_program, torchrun

pytestmark = pytest.mark.slow
MODULE = "aiorpc.examples.cuda_rpc"
LIMIT = 90.0  # seconds for programs that take about five
SMALL = ("--rounds", "3", "--batch", "40", "--size", "50")
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
CPU_LINES = (
    r"two shards of 50 x 50, 40 rows, 3 rounds, forward and backward",
    r"no CUDA device: both shards are on the CPU, and there is nothing to compare with",
    r"CPU RPC: \d+\.\d{4} s \(forward alone: \d+\.\d{4} s\)",
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.long
def test_without_a_gpu_the_cpu_part_runs_and_says_so(tmp_path: Path) -> None:
    """What is run, that there is no device, the seconds, a picture, and nothing on stderr."""
    outcome = run_program(["-m", MODULE, *SMALL, "--picture", "new/c.png"], tmp_path, timeout=LIMIT, env=NO_GPU)
    assert (outcome.code, outcome.err) == (0, "")
    assert matches(outcome.out, (*CPU_LINES, r"wrote new/c\.png")), outcome.out
    assert is_png(tmp_path / "new" / "c.png")


@pytest.mark.long
def test_it_runs_unchanged_under_torchrun(tmp_path: Path) -> None:
    """torchrun starts the two workers; only rank 0 speaks."""
    outcome = run_program(torchrun(2, "-m", MODULE, *SMALL), tmp_path, timeout=LIMIT, env=NO_GPU)
    assert outcome.code == 0, outcome.err
    assert matches(outcome.out, CPU_LINES), outcome.out


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("channel", ["auto", "staging"])
def test_with_a_gpu_both_ways_run(tmp_path: Path, channel: str) -> None:
    """Device to device and by way of the CPU, with the same result (the program checks it), and seconds of each."""
    settings = {"rounds": 3, "batch": 100, "size": 100, "device_channel": channel, "timeout": LIMIT}
    (result,) = run_all(MODULE, [settings], tmp_path, timeout=LIMIT).results
    assert result["devices"] == list(cuda_rpc.placement(torch.cuda.device_count()))
    assert set(result["seconds"]) == {"cpu", "cuda"} and all(taken > 0 for taken in result["seconds"].values())
    assert cuda_rpc.lines(result)[-1].startswith("ratio: ")
