"""The measurement of tensors on a GPU: pure parts, ways that fail, and a small run, on the CPU and on a GPU."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from bench import functions, gpu, gpu_clients
from bench.__main__ import main
from bench.bulk import KB, MB
from bench.gpu import AIORPC, COPY, RECEIVED, STAGING, TORCH, GpuRow
from bench.stage import Figures, Plan, Stage
from bench.stats import BenchError
from tests.bench.here import Here, one_element_wrong
from tests.limits import busy

ROOT = Path(__file__).resolve().parents[2]
CPU = ("cpu", "cpu")


@pytest.fixture(autouse=True)
def _forget_payloads() -> Iterator[None]:
    yield
    gpu_clients.payload.cache_clear()


def row(**values: tuple[float, ...]) -> GpuRow:
    names = {"ours": AIORPC, "staging": STAGING, "torch": TORCH, "copy": COPY}
    return GpuRow(RECEIVED, MB, {names[name]: value for name, value in values.items()})


def test_sizes_go_from_4_kb_to_1_gb() -> None:
    """In even steps, up to the last one."""
    assert (gpu.SIZES[0], gpu.SIZES[-1]) == (4 * KB, 1024 * MB)
    assert {after // before for before, after in zip(gpu.SIZES, gpu.SIZES[1:], strict=False)} == {4}


def test_sizes_without_room_are_left_out() -> None:
    """A small device gets the small tensors only; memory that is not known limits nothing."""
    assert gpu.sizes_that_fit((MB, 64 * MB, 1024 * MB), 2048 * MB) == (MB, 64 * MB)
    assert gpu.sizes_that_fit((MB, 1024 * MB), 0) == (MB, 1024 * MB)


@pytest.mark.parametrize(
    ("count", "devices", "name"),
    [
        (1, ("cuda:0", "cuda:0"), "nvidia-h100-80gb"),
        (2, ("cuda:0", "cuda:1"), "nvidia-h100-80gb-2"),
        (8, ("cuda:0", "cuda:1"), "nvidia-h100-80gb-2"),
    ],
)
def test_files_have_the_name_of_the_hardware(count: int, devices: tuple[str, str], name: str) -> None:
    """One GPU plays both ends; two are each one end, and the file's name says so."""
    assert gpu.devices_of(count) == devices
    assert gpu.default_out("NVIDIA H100 (80GB)", devices) == ROOT / "bench" / "results" / name


def test_ratios_are_against_torch_and_against_a_copy() -> None:
    """How many times as long torch takes, round by round, and how many plain copies one transfer costs."""
    written = row(ours=(100.0, 50.0), staging=(200.0, 200.0), torch=(400.0, 200.0), copy=(10.0, 10.0)).to_json()
    medians = {name: ratio["median"] for name, ratio in written["ratio"].items()}
    assert medians == {f"{TORCH} / {AIORPC}": 4.0, f"{TORCH} / {STAGING}": 1.5, f"{AIORPC} / {COPY}": 7.5}
    assert written["spread"][AIORPC] == {"median": 75.0, "minimum": 50.0, "maximum": 100.0}


def test_a_way_that_failed_leaves_its_cells_empty() -> None:
    """The table has a line for each row; without torch there is neither figure nor ratio of it."""
    heading, *lines = gpu.table([row(ours=(100.0,), copy=(10.0,)), row(ours=(1.0,), torch=(3.0,))]).splitlines()
    assert len(lines) == 2
    place = heading.index(TORCH)
    assert (lines[0][place], lines[1][place:].split()[:2]) == ("-", ["3.00", "µs"])
    assert lines[0].split()[-1] == "10.0x"
    assert lines[1].split()[-1] == "3.00x"


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One line and exit code 2; nothing is started."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["--gpu"]) == 2
    assert capsys.readouterr().err == "no CUDA device: nothing to measure\n"


@pytest.mark.parametrize("other", [("--only", "tensors"), ("--null",), ("--check",)])
def test_options_of_the_suite_are_refused(other: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """What --gpu would silently leave out is a usage error."""
    with pytest.raises(SystemExit) as ended:
        main(["--gpu", *other])
    assert ended.value.code == 2 and "--gpu has one measurement" in capsys.readouterr().err


def test_each_call_begins_at_rest() -> None:
    """The other end's device is waited for before each timed call, by a call of its own."""
    rpc = Here()
    found = gpu_clients.calls(rpc, functions.sink, 4 * KB, CPU, seconds=0.0, least=2)
    assert rpc.functions == [gpu_clients.synchronize, functions.sink] * 2
    assert found["samples"] == 2


def test_rest_is_not_timed() -> None:
    """Only the call counts, whatever the devices had left to do."""
    now = 0

    def work(nanoseconds: int) -> None:
        nonlocal now
        now += nanoseconds

    found = gpu_clients.timed_at_rest(lambda: work(10), lambda: work(1000), seconds=0.0, least=3, clock=lambda: now)
    assert found == [10, 10, 10]


def test_warming_up_does_all_that_is_measured() -> None:
    """Each handler has run before the clock starts."""
    rpc = Here()
    gpu_clients.warm_up(rpc, 4 * KB, "cpu")
    assert set(rpc.functions) == set(gpu.QUANTITIES.values())


def test_side_that_echoes_wrongly_is_not_measured() -> None:
    """An echo that differs in one element ends it."""
    with pytest.raises(BenchError, match="different"):
        gpu_clients.warm_up(Here(one_element_wrong), 4 * KB, "cpu")


class MadeUpCohort:
    """Answers each measurement with one figure; one of torch may fail from some size on."""

    def __init__(self, side: str, fails_from: int) -> None:
        self.side = side
        self.killed = False
        self._fails_from = fails_from

    def run(self, name: str, function: Callable[..., Any], /, size: int = 0, **kwargs: Any) -> Figures:
        if self.side == "torch" and size >= self._fails_from:
            raise BenchError("out of memory")
        return {"p50": 2.0}

    def kill(self) -> None:
        self.killed = True

    def __enter__(self) -> MadeUpCohort:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class MadeUpStage:
    """A stage without processes. starts: whether torch's workers come up."""

    def __init__(self, *, starts: bool = True, fails_from: int = 1 << 62) -> None:
        self.plan = Plan.quick()
        self.cohorts: list[MadeUpCohort] = []
        self.options: list[dict[str, Any]] = []
        self._starts, self._fails_from = starts, fails_from

    def start(self, side: str, names: Sequence[str], options: dict[str, Any]) -> MadeUpCohort:
        if side == "torch" and not self._starts:
            raise BenchError("no such luck")
        self.options.append(options)
        self.cohorts.append(MadeUpCohort(side, self._fails_from))
        return self.cohorts[-1]

    def activate(self, cohort: MadeUpCohort) -> MadeUpCohort:
        return cohort

    def alternate(self, cases: Mapping[str, Callable[[], Figures]], first: int) -> dict[str, list[Figures]]:
        return {name: [case()] for name, case in cases.items()}


def rows_of(stage: MadeUpStage, sizes: Sequence[int], devices: tuple[str, str] = CPU) -> tuple[list[GpuRow], gpu.Run]:
    with contextlib.ExitStack() as stack:
        run = gpu.Run(cast(Stage, stage), devices)
        run.start(stack)
        return [row for size in sizes for row in run.measure(size)], run


def test_devices_are_mapped_and_staging_is_forced() -> None:
    """The callers of both libraries have the same device map; who copies within a process needs none."""
    stage = MadeUpStage()
    rows_of(stage, [], ("cuda:0", "cuda:1"))
    maps = {"device_maps": {"server": {"cuda:0": "cuda:1"}}}
    assert stage.options == [maps, {"device_channel": "staging", **maps}, maps, {}]


def test_every_way_has_its_figures() -> None:
    """All libraries in all three quantities, the plain copy beside what waits for a one-way transfer."""
    rows, run = rows_of(MadeUpStage(), [KB])
    assert [set(each.values) for each in rows if each.quantity != RECEIVED] == [{AIORPC, STAGING, TORCH}] * 2
    assert [set(each.values) for each in rows if each.quantity == RECEIVED] == [{AIORPC, STAGING, TORCH, COPY}]
    assert run.failures == []


def test_a_way_that_fails_does_not_stop_the_others() -> None:
    """From the size on at which torch fails it is left out, its workers are ended, and the failure is told once."""
    stage = MadeUpStage(fails_from=MB)
    rows, run = rows_of(stage, [KB, MB, 4 * MB])
    assert [(each.size, TORCH in each.values) for each in rows if each.quantity == RECEIVED] == [
        (KB, True),
        (MB, False),
        (4 * MB, False),
    ]
    assert [(each.measurement, each.error) for each in run.failures] == [(TORCH, "1 MB: out of memory")]
    assert all(each.killed for each in stage.cohorts if each.side == "torch")


def test_a_way_that_does_not_start_is_told() -> None:
    """The others are measured, and the reason stands among the failures."""
    rows, run = rows_of(MadeUpStage(starts=False), [KB])
    assert set(rows[1].values) == {AIORPC, STAGING, COPY}
    assert [(each.measurement, each.error) for each in run.failures] == [(TORCH, "no such luck")]


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
