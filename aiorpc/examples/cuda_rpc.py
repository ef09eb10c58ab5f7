"""A model in two shards, each in a process: what they send goes by way of the CPU, and from device to device.

    python -m aiorpc.examples.cuda_rpc                      # ten rounds of 1,000 rows, two layers of 1,000 x 1,000
    python -m aiorpc.examples.cuda_rpc --device-channel staging
    python -m aiorpc.examples.cuda_rpc --picture cuda_rpc.png
    torchrun --standalone --nproc-per-node 2 -m aiorpc.examples.cuda_rpc

This is the model of PyTorch's recipe "Direct Device-to-Device Communication with TensorPipe CUDA RPC"
(https://docs.pytorch.org/tutorials/recipes/cuda_rpc.html). Without a device map a program takes each tensor to the CPU,
sends it, and takes it to the device at the other end, there and back. With one it just sends it. A round is the
recipe's, forward and backward in an autograd context, and begins and ends on the first shard's device: activations go
there and back, and so do their gradients. The forward pass is timed alone as well.

With two GPUs or more each shard has its own; with one GPU both are on it, in two processes; without any both are on the
CPU and only the first way is run. Results and gradients of both ways are compared with those of the model in one
process before anything is timed. It was run on one GPU, not yet on two; docs/inside/measurements.md has figures.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import aiorpc as rpc
from aiorpc import autograd

from ._shared.launch import Place, launch
from ._shared.program import CommandLine, figure

__all__ = ["Settings", "Shard", "main", "role", "run"]

NAMES = ("worker0", "worker1")
WARM_UP = 3
CHANNELS = ("auto", "ipc", "staging")
#: What each way is called.
TITLES = {"cpu": "CPU RPC", "cuda": "CUDA RPC"}
#: Seconds that the recipe gives for ten rounds, forward and backward, on two GPUs.
PUBLISHED = {"cpu": 2.3145179748535156, "cuda": 0.06867480278015137}


@dataclass(frozen=True)
class Settings:
    """What can be chosen for a run. batch: rows of the input. size: of each layer, which is square."""

    rounds: int = 10
    batch: int = 1000
    size: int = 1000
    device_channel: str = "auto"
    seed: int = 0
    timeout: float = 600.0


class Shard(torch.nn.Module):
    """One linear layer on a device. staged: its result is taken to the CPU, to be sent from there.

    Gradients take the same way back, as torch records it.
    """

    def __init__(self, number: int, settings: Settings, device: str, staged: bool) -> None:
        super().__init__()
        self.linear: torch.nn.Module = torch.nn.utils.skip_init(torch.nn.Linear, settings.size, settings.size)
        # The same layer in any process, even if other threads draw random numbers meanwhile.
        drawn = torch.Generator().manual_seed(settings.seed + number)
        bound = settings.size**-0.5
        for parameter in self.linear.parameters():
            torch.nn.init.uniform_(parameter, -bound, bound, generator=drawn)
        self.linear.to(device)
        self.device = device
        self.staged = staged

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.to(self.device))
        return y.cpu() if self.staged else y

    def gradients(self, context_id: int) -> list[Tensor]:
        """What an autograd context has for this layer, on the CPU."""
        found = autograd.get_gradients(context_id)
        return [found[parameter].cpu() for parameter in self.parameters()]


@dataclass(frozen=True)
class Split:
    """The whole model as the process of the first shard sees it."""

    first: Shard
    second: rpc.RRef[Shard]

    def forward(self, x: Tensor) -> Tensor:
        """There and back."""
        result: Tensor = self.second.rpc_sync().forward(self.first(x))
        return result.to(x.device)

    def round(self, x: Tensor) -> None:
        """Forward and backward."""
        with autograd.context() as context_id:
            autograd.backward(context_id, [self.forward(x).sum()])

    def results(self, x: Tensor) -> list[Tensor]:
        """The output, on the device of `x`, and the gradients of all parameters, on the CPU."""
        with autograd.context() as context_id:
            y = self.forward(x)
            autograd.backward(context_id, [y.sum()])
            return [y.detach(), *self.first.gradients(context_id), *self.second.rpc_sync().gradients(context_id)]


def placement(gpus: int) -> tuple[str, str]:
    """The devices of the two shards on a machine with so many GPUs."""
    if gpus == 0:
        return "cpu", "cpu"
    return "cuda:0", "cuda:1" if gpus > 1 else "cuda:0"


def split(settings: Settings, devices: tuple[str, str], way: str) -> Split:
    """Make one shard here and the other at its worker."""
    staged = way == "cpu"
    second = rpc.remote(NAMES[1], Shard, args=(1, settings, devices[1], staged))
    return Split(Shard(0, settings, devices[0], staged), second)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given; a CPU has when it returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def results_in_one_process(settings: Settings, x: Tensor) -> list[Tensor]:
    """What `Split.results` has to give."""
    first, second = (Shard(number, settings, str(x.device), staged=False) for number in (0, 1))
    y = second(first(x))
    gradients = torch.autograd.grad(y.sum(), [*first.parameters(), *second.parameters()])
    return [y.detach(), *(each.cpu() for each in gradients)]


def check(way: str, result: Tensor, expected: Tensor) -> None:
    """A way that changes the result, or a gradient, has no speed: RuntimeError."""
    # Sums over all rows round differently on different devices: by a share of the largest, not of the smallest.
    error = 1e-4 * max(1.0, expected.abs().max().item())
    if result.device != expected.device or not torch.allclose(result, expected, rtol=1e-4, atol=error):
        raise RuntimeError(f"{TITLES[way]}: the two shards gave another result than the model in one process")


def seconds_of(one_round: Callable[[Tensor], object], x: Tensor, rounds: int) -> float:
    """How long so many rounds take, the device's work included."""
    synchronize(x.device)
    started = time.perf_counter()
    for _ in range(rounds):
        one_round(x)
    synchronize(x.device)
    return time.perf_counter() - started


def drive(settings: Settings, devices: tuple[str, str]) -> dict[str, object]:
    """Warm up and check all ways, then time them."""
    torch.manual_seed(settings.seed)
    x = torch.randn(settings.batch, settings.size).to(devices[0])
    ways = ("cpu",) if devices[0] == "cpu" else ("cpu", "cuda")
    expected = results_in_one_process(settings, x)
    models = {way: split(settings, devices, way) for way in ways}
    for way, model in models.items():
        for _ in range(WARM_UP):
            for one, other in zip(model.results(x), expected, strict=True):
                check(way, one, other)
    return {
        "program": "cuda_rpc",
        **asdict(settings),
        "devices": list(devices),
        "hardware": [torch.cuda.get_device_name(each) if each != "cpu" else "the CPU" for each in devices],
        "seconds": {way: seconds_of(model.round, x, settings.rounds) for way, model in models.items()},
        "forward_seconds": {way: seconds_of(model.forward, x, settings.rounds) for way, model in models.items()},
    }


def role(place: Place, settings: Settings) -> dict[str, object] | None:
    """One process of the run: rank 0 has the first shard and drives, rank 1 has the second."""
    devices = placement(torch.cuda.device_count())
    options = rpc.RpcBackendOptions(device_channel=settings.device_channel)
    if place.rank == 0 and devices[0] != "cpu":
        options.set_device_map(NAMES[1], {devices[0]: devices[1]})
    rpc.init_rpc(NAMES[place.rank], rank=place.rank, world_size=place.world_size, rpc_backend_options=options)
    result = drive(settings, devices) if place.rank == 0 else None
    rpc.shutdown()
    return result


def run(settings: Settings) -> dict[str, object] | None:
    """Run all ways once and return the result as plain data (under torchrun: on rank 0, None elsewhere).

    Raises: WorkerFailed when a worker died, raised (as when a result was wrong) or was not done in
    ``settings.timeout`` seconds.
    """
    return launch(role, settings, NAMES, timeout=settings.timeout)


def lines(result: dict[str, Any]) -> list[str]:
    """What a run has to tell."""
    seconds: dict[str, float] = result["seconds"]
    said = [
        f"two shards of {result['size']:,} x {result['size']:,}, {result['batch']:,} rows, "
        f"{result['rounds']} round{'s' if result['rounds'] > 1 else ''}, forward and backward"
    ]
    if "cuda" in seconds:
        places = zip(NAMES, result["devices"], result["hardware"], strict=True)
        said.append(", ".join(f"{name} on {device} ({hardware})" for name, device, hardware in places))
    else:
        said.append("no CUDA device: both shards are on the CPU, and there is nothing to compare with")
    forward: dict[str, float] = result["forward_seconds"]
    said += [f"{TITLES[way]}: {taken:.4f} s (forward alone: {forward[way]:.4f} s)" for way, taken in seconds.items()]
    if "cuda" in seconds:
        published = f"{PUBLISHED['cpu']:.4f} s / {PUBLISHED['cuda']:.4f} s = {_ratio(PUBLISHED):.0f}"
        said.append(f"ratio: {_ratio(seconds):.1f} (the recipe on two GPUs: {published})")
    return said


def _ratio(seconds: dict[str, float]) -> float:
    return seconds["cpu"] / seconds["cuda"]


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw a bar for each way into a PNG file at ``path``. result: as ``run`` returns it."""
    seconds = {TITLES[way]: taken for way, taken in result["seconds"].items()}
    hardware = " and ".join(dict.fromkeys(result["hardware"]))
    with figure(path, 7.0, 1.4 + 0.5 * len(seconds)) as page:
        axes = page.add_subplot()
        bars = axes.barh(
            list(seconds), [1e3 * taken for taken in seconds.values()], color=["#c9602c", "#1f6fb4"], height=0.6
        )
        axes.bar_label(bars, fmt="%.1f", padding=3)
        axes.margins(x=0.12)
        axes.invert_yaxis()
        axes.set(xlabel=f"milliseconds for {result['rounds']} rounds, forward and backward")
        axes.set_title(f"cuda_rpc: two shards of {result['size']:,} x {result['size']:,} on {hardware}", fontsize=10)


def command_line() -> CommandLine[Settings]:
    """The command line."""
    made = CommandLine(
        "cuda_rpc",
        "A model in two shards, forward and backward: by way of the CPU against device to device.",
        Settings(),
    )
    made.option("rounds", "how often the input goes through the model", least=1)
    made.option("batch", "rows of the input", least=1)
    made.option("size", "columns of the input, and size of both layers", least=1)
    made.option("device_channel", choices=CHANNELS)
    made.common_options(picture="the seconds")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit code."""
    commands = command_line()
    return commands.main(argv, run, lines, draw, lambda settings: commands.need_workers(len(NAMES)))


if __name__ == "__main__":
    # By its real name, not __main__: classes and functions travel to the other workers by name.
    from aiorpc.examples import cuda_rpc

    sys.exit(cuda_rpc.main())
