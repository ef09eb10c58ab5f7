"""``python -m bench --gpu``: tensors from device to device, against torch.distributed.rpc and a plain copy.

Three figures for each size, each of calls that begin when both devices are at rest:

- *sent, call returned*: the caller may go on. The device may still be copying: neither library waits for it.
- *sent, received*: the handler waits for its device before it answers, so the tensor is there.
- *echoed*: the tensor has come back, and the caller has waited for its device.

The plain copy, ``target.copy_(source)`` within one process and waited for, stands beside the second. With one GPU both
processes use it (device 0 to 0), with more it goes from the first to the second.

Besides, a training step of two layers, one in each process: forward, backward and the optimizers' step, waited for. Its
size is that of the activations, which go there and back, as their gradients do.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import functions, gpu_clients, gradient_clients, hardware, machine, report
from .bulk import KB, MB, label
from .cohort import Cohort
from .picture import OURS, THEIRS, page
from .sides import CLIENT, PAIR, SideName
from .stage import Figures, Plan, Stage, column, progress
from .stats import BenchError, Failure, Row, Spread

RESULTS = Path(__file__).parent / "results"
SIZES = (4 * KB, 16 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 16 * MB, 64 * MB, 256 * MB, 1024 * MB)
#: A device must have room for so many tensors: all that the libraries and torch's caches keep of a size.
TENSORS_HELD = 20
SHARE = 0.25  # of the plan's seconds: there are many sizes
AIORPC, STAGING, TORCH, COPY = "aiorpc", "aiorpc, staging", "torch.distributed.rpc", "plain copy"
RECEIVED = "sent, received"
TRAINING = "training step"
WIDTH = 1024  # of both layers, and of the batch
WARM_UP_STEPS = 5
#: Whose times are divided by whose: the second of each pair by the first.
RATIOS = ((AIORPC, TORCH), (STAGING, TORCH), (COPY, AIORPC))
QUANTITIES: dict[str, Callable[..., Any]] = {
    "sent, call returned": functions.sink,
    RECEIVED: gpu_clients.receive,
    "echoed": functions.echo,
}


@dataclass(frozen=True)
class Way:
    """How a tensor gets from one place to the other. options: beside the device map."""

    name: str
    side: SideName
    workers: tuple[str, ...] = PAIR
    options: dict[str, Any] = field(default_factory=dict)


WAYS = (
    Way(AIORPC, "aiorpc"),
    Way(STAGING, "aiorpc", options={"device_channel": "staging"}),
    Way(TORCH, "torch"),
    Way(COPY, "aiorpc", workers=(CLIENT,)),
)


@dataclass(frozen=True)
class GpuRow:
    """One figure of one size. values: by way, microseconds of each round; a way that failed is not there."""

    quantity: str
    size: int
    values: dict[str, tuple[float, ...]]

    def compare(self, way: str, other: str) -> Row:
        """Two ways beside each other; the ratio says how many times as long the other takes."""
        ours, theirs = self.values.get(way, ()), self.values.get(other, ())
        return Row("gpu", self.quantity, "µs", "lower", ours, theirs, note=label(self.size), payload=self.size)

    def to_json(self) -> dict[str, Any]:
        """The row and what follows from it."""
        spreads = {way: Spread.of(values) for way, values in self.values.items()}
        ratios = {f"{other} / {way}": self.compare(way, other).ratio for way, other in RATIOS}
        return {
            "quantity": self.quantity,
            "bytes": self.size,
            "unit": "µs",
            "values": self.values,
            "spread": {way: asdict(spread) for way, spread in spreads.items()},
            "ratio": {name: asdict(ratio) for name, ratio in ratios.items() if ratio},
        }


@dataclass(frozen=True)
class Found:
    """All of one run. facts: machine, devices, versions, command. seconds: how long it took."""

    facts: dict[str, str]
    rows: tuple[GpuRow, ...]
    failures: tuple[Failure, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        rows = [row.to_json() for row in self.rows]
        failures = [asdict(each) for each in self.failures]
        return {"facts": self.facts, "seconds": self.seconds, "rows": rows, "failures": failures}


class _WayFailed(BenchError):
    """A way that gave no figure, and will give no other."""

    def __init__(self, way: str, error: BenchError) -> None:
        super().__init__(str(error))
        self.way = way


class Run:
    """The ways that still work, and what went wrong with the others."""

    def __init__(self, stage: Stage, devices: tuple[str, str]) -> None:
        self._stage = stage
        self._devices = devices
        self._cohorts: dict[str, Cohort] = {}
        self.failures: list[Failure] = []

    def start(self, stack: contextlib.ExitStack, ways: Sequence[Way] = WAYS) -> None:
        """Start the processes of all ways; the stack ends them."""
        source, target = self._devices
        maps = {} if source == "cpu" else {"device_maps": {PAIR[0]: {source: target}}}
        for way in ways:
            progress(f"         starting {way.name}")
            options = {**way.options, **(maps if way.workers == PAIR else {})}
            try:
                cohort = self._stage.start(way.side, way.workers, options=options)
            except BenchError as error:
                self.failures.append(Failure(way.name, str(error)))
            else:
                self._cohorts[way.name] = stack.enter_context(cohort)

    def describe(self) -> dict[str, str]:
        """The devices, as one of the processes sees them; BenchError when none is left."""
        if not self._cohorts:
            raise BenchError("\n".join(["no way could be started", *(each.error for each in self.failures)]))
        found: dict[str, str] = self._in_client(next(iter(self._cohorts)), gpu_clients.describe, devices=self._devices)
        return found

    def measure(self, size: int) -> list[GpuRow]:
        """All figures of that size."""
        return self._with_those_that_work(label(size), partial(self._rows, size))

    def train(self, width: int = WIDTH) -> list[GpuRow]:
        """A training step, with layers of that width."""
        return self._with_those_that_work(TRAINING, partial(self._steps, width))

    def _with_those_that_work(self, what: str, measure: Callable[[], list[GpuRow]]) -> list[GpuRow]:
        """A way that fails is dropped, and all is measured anew with the others."""
        progress(f"         {what}")
        while self._cohorts:
            try:
                return measure()
            except _WayFailed as failure:
                progress(f"         {failure.way} failed and is left out from here on")
                self.failures.append(Failure(failure.way, f"{what}: {failure}"))
                self._cohorts.pop(failure.way).kill()
        return []

    def _calling(self) -> list[str]:
        return [name for name in self._cohorts if name != COPY]

    def _steps(self, width: int) -> list[GpuRow]:
        share = {"width": width, "batch": width, "warm_up": WARM_UP_STEPS, "devices": self._devices, **self._box()}
        cases: dict[str, Callable[[], Figures]] = {
            name: partial(self._in_client, name, gradient_clients.steps, **share) for name in self._calling()
        }
        found = self._stage.alternate(cases, first=0)
        values = {name: tuple(1e6 / each for each in column(found[name], "step")) for name in cases}
        return [GpuRow(TRAINING, 4 * width * width, values)]

    def _rows(self, size: int) -> list[GpuRow]:
        calling = self._calling()
        for name in calling:
            self._in_client(name, gpu_clients.warm_up, size=size, device=self._devices[0])
        share = {"size": size, "devices": self._devices, **self._box()}
        cases: dict[str, Callable[[], Figures]] = {
            f"{quantity}, {name}": partial(self._in_client, name, gpu_clients.calls, function=function, **share)
            for quantity, function in QUANTITIES.items()
            for name in calling
        }
        if COPY in self._cohorts:
            cases[f"{RECEIVED}, {COPY}"] = partial(self._in_client, COPY, gpu_clients.copies, **share)
        found = self._stage.alternate(cases, first=0)  # it is warm
        return [_row(quantity, size, found) for quantity in QUANTITIES]

    def _box(self) -> dict[str, Any]:
        return {"seconds": self._stage.plan.seconds * SHARE, "least": self._stage.plan.transfers}

    def _in_client(self, way: str, measure: Callable[..., Any], /, **kwargs: Any) -> Any:
        try:
            return self._stage.activate(self._cohorts[way]).run(CLIENT, measure, **kwargs)
        except BenchError as error:
            raise _WayFailed(way, error) from error


def _row(quantity: str, size: int, found: Mapping[str, Sequence[Figures]]) -> GpuRow:
    ways = [way.name for way in WAYS if f"{quantity}, {way.name}" in found]
    return GpuRow(quantity, size, {way: column(found[f"{quantity}, {way}"], "p50") for way in ways})


def sizes_that_fit(sizes: Sequence[int], memory: int) -> tuple[int, ...]:
    """Those a device with so many bytes has room for; all when the memory is not known (0)."""
    return tuple(size for size in sizes if not memory or size * TENSORS_HELD <= memory)


def devices_of(count: int) -> tuple[str, str]:
    """From where to where, on a machine with so many GPUs."""
    return "cuda:0", "cuda:1" if count > 1 else "cuda:0"


def measure(
    plan: Plan,
    arguments: Sequence[str],
    devices: tuple[str, str],
    sizes: Sequence[int] = SIZES,
    width: int = WIDTH,
) -> Found:
    """Measure all sizes, and a training step with layers of that width.

    devices: of the caller and the callee; ``("cpu", "cpu")`` tries the program without a GPU.
    """
    begin = time.monotonic()
    facts = hardware.facts(arguments, plan.rounds, plan.seconds * SHARE) | machine.speed()
    with Stage(plan) as stage, contextlib.ExitStack() as stack:
        run = Run(stage, devices)
        run.start(stack)
        facts |= run.describe()
        facts |= {"sides": "aiorpc against torch.distributed.rpc and a plain copy", "method": _method(plan)}
        chosen = sizes_that_fit(sizes, int(facts["device memory"]))
        facts["left out"] = ", ".join(label(size) for size in sizes if size not in chosen) or "nothing"
        rows = [row for size in chosen for row in run.measure(size)] + run.train(width)
    return Found(facts, tuple(rows), tuple(run.failures), time.monotonic() - begin)


def _method(plan: Plan) -> str:
    return (
        f"{plan.rounds} rounds, warm, ways in turn, {plan.seconds * SHARE:g} s each and {plan.transfers} calls at "
        "least; both devices at rest before each call; p50 of each round; the waiting ways' workers stopped (SIGSTOP); "
        "one OMP thread"
    )


def default_out(device: str, devices: tuple[str, str]) -> Path:
    """Where the figures go: ``results/<name of the device>``, with ``-2`` if there were two of them."""
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return RESULTS / (slug if devices[0] == devices[1] else f"{slug}-2")


def table(rows: Sequence[GpuRow]) -> str:
    """The figures in plain text, columns aligned: medians of the rounds with [minimum..maximum]."""
    headings = ("size", "quantity", *(way.name for way in WAYS), *(f"{other} / {way}" for way, other in RATIOS))
    return report.aligned([headings, *(_cells(row) for row in rows)])


def _cells(row: GpuRow) -> tuple[str, ...]:
    figures = (report.cells(row.compare(way.name, way.name))[2] for way in WAYS)
    ratios = (report.cells(row.compare(way, other))[4] for way, other in RATIOS)
    return (label(row.size), row.quantity, *figures, *ratios)


def line(facts: Mapping[str, str]) -> str:
    """What it was measured on, a line for the devices, one for the machine, one for how fast that is."""
    devices = f"{facts['devices']}; driver {facts['driver']}, CUDA {facts['cuda']}"
    return "\n".join(filter(None, (devices, hardware.line(dict(facts)), machine.line(facts))))


def show(found: Found) -> None:
    """Print the outcome on stdout."""
    print(table(found.rows))
    for failure in found.failures:
        print(f"FAILED {failure.measurement}: {failure.error}")
    if found.facts["left out"] != "nothing":
        print(f"left out, as the device has too little memory: {found.facts['left out']}")
    print(f"{line(found.facts)}\n{found.facts['method']}\n{found.facts['command']}   ({found.seconds:.0f} s)")


def write(found: Found, out: Path) -> None:
    """Write ``out``.json, and ``out``.png where there is matplotlib."""
    path, drawn = out.with_name(f"{out.name}.json"), out.with_name(f"{out.name}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found.to_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {path}")
    try:
        draw(found, drawn)
    except ImportError as error:
        print(f"no picture: {error}", file=sys.stderr)
    else:
        print(f"wrote {drawn}")


#: Line style and colour of each way.
_STYLES = {AIORPC: ("-", OURS), STAGING: ("--", OURS), TORCH: ("-", THEIRS), COPY: (":", "black")}


def draw(found: Found, path: Path) -> None:
    """Write a PNG of time against size, a panel for each quantity; ImportError without matplotlib."""
    with page(path, 15, 5.5) as figure:
        panels = figure.subplots(1, len(QUANTITIES), squeeze=False, sharey=True)[0]
        for axes, quantity in zip(panels, QUANTITIES, strict=True):
            _draw_panel(axes, quantity, [row for row in found.rows if row.quantity == quantity])
        figure.suptitle(f"{found.facts['sides']}\n{line(found.facts)}", fontsize=9)


def _draw_panel(axes: Any, quantity: str, rows: Sequence[GpuRow]) -> None:
    from matplotlib.ticker import EngFormatter, NullLocator

    for way, (style, colour) in _STYLES.items():
        spreads = {row.size: Spread.of(row.values[way]) for row in rows if way in row.values}
        if spreads:
            sizes = list(spreads)
            medians = [each.median / 1e6 for each in spreads.values()]
            axes.plot(sizes, medians, linestyle=style, marker="o", markersize=4, color=colour, label=way)
            edges = [each.minimum / 1e6 for each in spreads.values()], [each.maximum / 1e6 for each in spreads.values()]
            axes.fill_between(sizes, *edges, color=colour, alpha=0.15)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([row.size for row in rows], [label(row.size) for row in rows], fontsize=7, rotation=45)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(EngFormatter(unit="s"))
    axes.tick_params(axis="y", labelleft=True)
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.set_title(f"{quantity} (line: median of rounds, shade: minimum to maximum)", fontsize=8)
    axes.set_xlabel("size of the tensor")
    if rows:
        axes.legend(fontsize=8)


def main(plan: Plan, arguments: Sequence[str], out: Path | None = None) -> int:
    """Measure, print and write (into ``bench/results/<device>`` if not told where); returns the exit code.

    1 when a way failed, 2 when there is no device.
    """
    count = torch.cuda.device_count()
    if count == 0:
        print("no CUDA device: nothing to measure", file=sys.stderr)
        return 2
    devices = devices_of(count)
    try:
        found = measure(plan, arguments, devices)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    show(found)
    write(found, out or default_out(found.facts["device"], devices))
    return 1 if found.failures else 0
