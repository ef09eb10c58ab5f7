"""Which tensors on devices may go to another worker, and to which of its devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ..errors import SerializationError
from .accelerator import Accelerator, Tensor

_CPU = torch.device("cpu")
_Map = Mapping[torch.device, torch.device]


class Route:
    """One direction between two workers: a device map, and what there is here to carry it out. Immutable.

    worker: the other one. hint: what to do about a device that the map does not name; ends the error's text.
    """

    def __init__(self, accelerator: Accelerator | None, devices: _Map, worker: str, hint: str) -> None:
        self.accelerator = accelerator
        self.worker = worker
        self._hint = hint
        self._targets = {source: str(target) for source, target in devices.items()}
        host = self._targets.get(_CPU, "cpu")
        self.host_target: str = "" if host == "cpu" else host  # where tensors in the host's memory go, if not to that

    def __bool__(self) -> bool:
        """Whether tensors have to be looked at at all."""
        return self.accelerator is not None or bool(self.host_target)

    def takes(self, tensor: Tensor) -> bool:
        """Whether the tensor lies on a device of ours and can go as it is: False for one that has to be taken apart.

        Raises SerializationError for one on a device that the map does not name.
        """
        if self.accelerator is None or tensor.device.type != self.accelerator.kind:
            return False
        self.target(tensor)
        return self.accelerator.holds(tensor)

    def leads(self, device: torch.device) -> bool:
        """Whether what lies on that device can go."""
        return self.accelerator is not None and device in self._targets

    def target(self, tensor: Tensor) -> str:
        """Where the map sends what lies on that tensor's device. Raises SerializationError."""
        target = self._targets.get(tensor.device)
        if target is None:
            shape = "" if tensor.is_nested else f" of shape {tuple(tensor.shape)}"
            raise SerializationError(
                f"a {tensor.dtype} tensor{shape} on {tensor.device}: no device map leads from there to worker "
                f"{self.worker!r}; {self._hint}"
            )
        return target


class Staying(Route):
    """From a worker to itself, where it has no map for that: what lies on a device stays there."""

    def __init__(self, accelerator: Accelerator | None, worker: str, use: Callable[[int], None]) -> None:
        """use: told of each device that something goes by."""
        super().__init__(accelerator, {}, worker, "")
        self._use = use

    def leads(self, device: torch.device) -> bool:
        """Everywhere where tensors of ours can be."""
        return self.accelerator is not None and device.type == self.accelerator.kind

    def target(self, tensor: Tensor) -> str:
        """Where it is."""
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
    """For requests to that worker. as_torch: say it in words that programs for torch may look for."""
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
    """For answers to that worker, by the inverse of its map of ours. as_torch: as of `going`."""
    inverse = {target: source for source, target in devices.items()}
    hint = "answers go by the inverse of the caller's map to this worker, which the caller sets; or return tensor.cpu()"
    if as_torch:
        hint = f"Response device mapping is not available: {hint}"
    return Route(accelerator, inverse, worker, hint)
