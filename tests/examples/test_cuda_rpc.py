"""cuda_rpc, small: the CPU part as its users run it; both ways where there is a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aiorpc.examples import cuda_rpc
from aiorpc.examples.cuda_rpc import Settings, Shard
from tests.examples.programs import is_png, matches, run_all, run_program, torchrun, usage_error

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


def a_result(**seconds: float) -> dict[str, Any]:
    """What ``run`` returns, with seconds given here."""
    devices = ["cuda:0", "cuda:1"] if "cuda" in seconds else ["cpu", "cpu"]
    return {
        "rounds": 10,
        "batch": 1000,
        "size": 1000,
        "devices": devices,
        "hardware": ["A", "B"],
        "seconds": seconds,
        "forward_seconds": {way: taken / 4 for way, taken in seconds.items()},
    }


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


@pytest.mark.parametrize(
    ("gpus", "devices"),
    [(0, ("cpu", "cpu")), (1, ("cuda:0", "cuda:0")), (2, ("cuda:0", "cuda:1")), (8, ("cuda:0", "cuda:1"))],
)
def test_shards_share_a_gpu_only_if_they_must(gpus: int, devices: tuple[str, str]) -> None:
    """One GPU takes both; of two or more, each has its own."""
    assert cuda_rpc.placement(gpus) == devices


def test_a_shard_is_the_same_wherever_it_is_made() -> None:
    """Number and seed make the layer, and nobody else's random numbers are touched by it."""
    before = torch.get_rng_state()
    settings = Settings(size=8)
    first, again, other = (Shard(number, settings, "cpu", staged=False) for number in (1, 1, 0))
    assert torch.equal(first.linear.weight, again.linear.weight)  # type: ignore[arg-type]
    assert not torch.equal(first.linear.weight, other.linear.weight)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_wrong_result_has_no_speed() -> None:
    """One element that differs ends the run, with the name of the way."""
    expected = torch.zeros(4, 4)
    cuda_rpc.check("cuda", expected.clone(), expected)
    with pytest.raises(RuntimeError, match=r"CUDA RPC: the two shards gave another result"):
        cuda_rpc.check("cuda", expected.index_fill(0, torch.tensor([3]), 0.01), expected)


def test_both_ways_are_compared_with_each_other_and_with_the_recipe() -> None:
    """A line for each way, then their ratio, beside the published 34."""
    said = cuda_rpc.lines(a_result(cpu=0.5, cuda=0.02))
    assert said[1] == "worker0 on cuda:0 (A), worker1 on cuda:1 (B)"
    assert said[2:4] == [
        "CPU RPC: 0.5000 s (forward alone: 0.1250 s)",
        "CUDA RPC: 0.0200 s (forward alone: 0.0050 s)",
    ]
    published = "2.3145 s / 0.0687 s = 34"
    assert said[4] == f"ratio: 25.0 (the recipe on two GPUs: {published})"


@pytest.mark.parametrize("name", ["--rounds", "--batch", "--size"])
def test_what_cannot_be_run_is_refused(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """A usage error that names the option, before anything is started."""
    assert f"error: {name} must be at least 1" in usage_error(cuda_rpc.main, [name, "0"], capsys)


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
