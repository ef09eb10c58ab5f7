"""The measurement of tensors on a GPU: pure parts, ways that fail, and a small run, on the CPU and on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu, gpu_clients
from bench.gpu import AIORPC, COPY, RECEIVED, STAGING, TORCH
from tests.limits import busy

ROOT = Path(__file__).resolve().parents[2]
CPU = ("cpu", "cpu")


@pytest.fixture(autouse=True)
def _forget_payloads() -> Iterator[None]:
    yield
    gpu_clients.payload.cache_clear()


SMALL_RUN = """
import sys
from dataclasses import replace
from pathlib import Path
from bench import gpu
from bench.stage import Plan
plan = replace(Plan.quick(), rounds=1, seconds=0.1)
found = gpu.measure(plan, ["--gpu"], (sys.argv[1], sys.argv[2]), (4096, 1 << 20), 64)
gpu.show(found)
gpu.write(found, Path(sys.argv[3]))
"""


def small_run(devices: tuple[str, str], out: Path) -> tuple[dict[str, Any], str]:
    # A process of its own: the fork server it starts ends with it.
    command = [sys.executable, "-c", SMALL_RUN, *devices, str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110 * busy(), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    data: dict[str, Any] = json.loads(out.with_name(f"{out.name}.json").read_text(encoding="utf-8"))
    assert data["failures"] == []
    figures = {(each["quantity"], each["bytes"]): each["values"] for each in data["rows"]}
    transfers = {(quantity, size) for quantity in gpu.QUANTITIES for size in (4096, 1 << 20)}
    assert set(figures) == transfers | {(gpu.TRAINING, 4 * 64 * 64)}
    assert set(figures[gpu.TRAINING, 4 * 64 * 64]) == {AIORPC, STAGING, TORCH}
    assert all(len(rounds) == 1 and rounds[0] > 0 for values in figures.values() for rounds in values.values())
    assert set(figures[RECEIVED, 4096]) == {AIORPC, STAGING, TORCH, COPY}
    assert out.with_name(f"{out.name}.png").read_bytes().startswith(b"\x89PNG")
    return data, done.stdout


@pytest.mark.long
@pytest.mark.slow
def test_small_run_on_the_cpu_gives_figures_and_files(tmp_path: Path) -> None:
    """The whole way from worker processes to table, JSON and picture, with tensors on the CPU; the files say so."""
    pytest.importorskip("matplotlib", exc_type=ImportError)
    data, said = small_run(CPU, tmp_path / "new" / "gpu-1.5")
    assert data["facts"]["devices"].startswith("cpu to cpu")
    assert said.splitlines()[-1].endswith("gpu-1.5.png")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_small_run_on_the_gpu_names_the_hardware(tmp_path: Path) -> None:
    """The same with tensors on one device, or from the first to the second."""
    pytest.importorskip("matplotlib", exc_type=ImportError)
    data, _ = small_run(gpu.devices_of(torch.cuda.device_count()), tmp_path / "gpu")
    assert torch.cuda.get_device_name(0) in data["facts"]["devices"]
    assert data["facts"]["driver"] != "none"
