"""Which tensors on devices may go to another worker, and to which of its devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ..errors import SerializationError
from .accelerator import Accelerator, Tensor

_CPU = torch.device("cpu")
_Map = Mapping[torch.device, torch.device]


class Route:
    """One direction between two workers: the device map, and this process's accelerator. Immutable.

    worker: name of the other one. hint: what to do about a device that the map does not name; ends the error's text.
    """

    def __init__(self, accelerator: Accelerator | None, devices: _Map, worker: str, hint: str) -> None:
        self.accelerator = accelerator
        self.worker = worker
        self._hint = hint
        self._targets = {source: str(target) for source, target in devices.items()}
        host = self._targets.get(_CPU, "cpu")
        self.host_target: str = "" if host == "cpu" else host  # the device for tensors in the host's memory, if any

    def __bool__(self) -> bool:
        """Whether any tensor needs the route."""
        return self.accelerator is not None or bool(self.host_target)

    def takes(self, tensor: Tensor) -> bool:
        """Whether the tensor lies on a device of ours and can go as a whole. False: pickle takes it apart.

        Raises SerializationError for a tensor on a device that the map does not name.
        """
        if self.accelerator is None or tensor.device.type != self.accelerator.kind:
            return False
        self.target(tensor)
        return self.accelerator.holds(tensor)

    def leads(self, device: torch.device) -> bool:
        """Whether tensors on that device can go."""
        return self.accelerator is not None and device in self._targets

    def target(self, tensor: Tensor) -> str:
        """Where the map sends tensors on that tensor's device. Raises SerializationError."""
        target = self._targets.get(tensor.device)
        if target is None:
            shape = "" if tensor.is_nested else f" of shape {tuple(tensor.shape)}"
            raise SerializationError(
                f"a {tensor.dtype} tensor{shape} on {tensor.device}: no device map leads from there to worker "
                f"{self.worker!r}; {self._hint}"
            )
        return target


class Staying(Route):
    """From a worker to itself without a map: tensors on a device stay there."""

    def __init__(self, accelerator: Accelerator | None, worker: str, use: Callable[[int], None]) -> None:
        """use: called with the index of each device that is used."""
        super().__init__(accelerator, {}, worker, "")
        self._use = use

    def leads(self, device: torch.device) -> bool:
        """True for all devices of ours."""
        return self.accelerator is not None and device.type == self.accelerator.kind

    def target(self, tensor: Tensor) -> str:
        """The tensor's own device."""
        assert tensor.device.index is not None, "it lies on a device"
        self._use(tensor.device.index)
        return str(tensor.device)


def going(
    accelerator: Accelerator | None,
    devices: Mapping[torch.device, torch.device],
    worker: str,
    *,
    as_torch: bool = False,
) -> Route:
    """For requests to that worker. as_torch: the error has words that programs for torch may look for."""
    hint = f"set one before init (options.set_device_map({worker!r}, {{0: 0}}), say), or send tensor.cpu()"
    if as_torch:
        hint = (
            "TensorPipe RPC backend only supports CPU tensors by default; to send others call `set_device_map` on "
            f"`TensorPipeRpcBackendOptions`: {hint}"
        )
    return Route(accelerator, devices, worker, hint)


def returning(
    accelerator: Accelerator | None,
    devices: Mapping[torch.device, torch.device],
    worker: str,
    *,
    as_torch: bool = False,
) -> Route:
    """For answers to that worker, by the inverse of its map to this worker. as_torch: see `going`."""
    inverse = {target: source for source, target in devices.items()}
    hint = "answers go by the inverse of the caller's map to this worker, which the caller sets; or return tensor.cpu()"
    if as_torch:
        hint = f"Response device mapping is not available: {hint}"
    return Route(accelerator, inverse, worker, hint)
