"""What a client process measures of tensors on a device, the same code on both sides; and what its server runs for it.

A device does its work after the call that asked for it has returned. So each call begins when both devices are at rest,
and whether the clock waits for the device is part of what is measured. On the CPU (for tests) nothing is ever pending.
"""

from __future__ import annotations

import functools
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import bulk_clients, functions
from .clients import check_echo
from .sides import SERVER, RpcModule
from .stats import summary

WARM_UP_CALLS = 3
DRIVER = Path("/proc/driver/nvidia/version")


def synchronize(device: str | torch.device) -> None:
    """Wait until the device has done everything that this process gave it."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def receive(tensor: torch.Tensor) -> int:
    """Take a tensor, wait until it is there, and give a tiny answer."""
    synchronize(tensor.device)
    return tensor.numel()


@functools.lru_cache(maxsize=1)
def payload(size: int, device: str) -> torch.Tensor:
    """A float32 tensor of that many bytes on the device; only the latest is kept."""
    made = torch.arange(size // 4, dtype=torch.float32, device=device)
    synchronize(device)
    return made


def warm_up(rpc: RpcModule, size: int, device: str) -> dict[str, float]:
    """Send and echo a few times, and look at what comes back."""
    args = (payload(size, device),)
    for _ in range(WARM_UP_CALLS):
        for function in (functions.sink, receive):
            rpc.rpc_sync(SERVER, function, args=args)
        check_echo(functions.echo, args, rpc.rpc_sync(SERVER, functions.echo, args=args))
    return {}


def calls(
    rpc: RpcModule,
    function: Callable[..., Any],
    size: int,
    devices: tuple[str, str],
    seconds: float,
    least: int,
) -> dict[str, float]:
    """Microseconds of one blocking call with a tensor, both devices at rest. A tensor that comes back is waited for.

    devices: of the tensor here and at the other end.
    """
    args = (payload(size, devices[0]),)

    def call() -> object:
        answer = rpc.rpc_sync(SERVER, function, args=args)
        if isinstance(answer, torch.Tensor):
            synchronize(answer.device)
        return answer

    def rest() -> None:
        synchronize(devices[0])
        rpc.rpc_sync(SERVER, synchronize, args=(devices[1],))

    return summary(timed_at_rest(call, rest, seconds, least))


def timed_at_rest(
    call: Callable[[], object],
    rest: Callable[[], None],
    seconds: float,
    least: int,
    *,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> list[int]:
    """Nanoseconds of each call for so long, and of `least` calls at least, with `rest`, untimed, before each.

    `bulk_clients.timed` goes on at once; here that would be timing a queue on the device.
    """
    samples: list[int] = []
    end = clock() + int(seconds * 1e9)
    while len(samples) < least or clock() < end:
        rest()
        before = clock()
        answer = call()
        samples.append(clock() - before)
        del answer
    return samples


def copies(rpc: object, size: int, devices: tuple[str, str], seconds: float, least: int) -> dict[str, float]:
    """Microseconds of a plain copy within this process, waited for: what a transfer cannot beat."""
    source = payload(size, devices[0])
    target = torch.empty_like(source, device=devices[1])

    def copy() -> None:
        target.copy_(source)
        for device in dict.fromkeys(devices):
            synchronize(device)

    return summary(bulk_clients.timed(copy, seconds, least))


def describe(rpc: object, devices: tuple[str, str]) -> dict[str, str]:
    """What the devices are, and how many bytes of memory the smaller of them has ("0" if that does not matter)."""
    if devices[0] == "cpu":
        tried = {"device": "cpu", "devices": "cpu to cpu, to try the program"}
        return {**tried, "driver": "none", "cuda": "none", "device memory": "0"}
    name = torch.cuda.get_device_name(devices[0])
    memory = min(torch.cuda.get_device_properties(device).total_memory for device in devices)
    return {
        "device": name,
        "devices": f"{name}, {devices[0]} to {devices[1]}",
        "driver": driver(),
        "cuda": str(torch.version.cuda),
        "device memory": str(memory),
    }


def driver() -> str:
    """The version of NVIDIA's driver, from its tool or from the kernel; "unknown" where neither says."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20.0, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        said = []
    if said:
        return said[0]
    try:
        return DRIVER.read_text(encoding="utf-8").partition("\n")[0].partition(":")[2].strip() or "unknown"
    except OSError:
        return "unknown"
