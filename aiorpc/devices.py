"""Devices and device maps: how they are written, what a worker claims, and whether the claims of a group fit together.

The rules are torch.distributed.rpc's, and so are the first lines of error texts; a `DeviceMapError` is a
``ValueError``, as there. Pure data: nothing here needs a device. Any thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import DeviceMapError

Device = int | str | torch.device
DeviceMap = dict[torch.device, torch.device]

CPU = torch.device("cpu")

# torch keeps an index in eight bits with a sign, and silently wraps larger ones around.
_MOST_DEVICES = 128
_LONGEST_LIST = 1024
_MOST_TARGETS = 1 << 16
_LONGEST_NAME = 128


def accelerator_kind() -> str:
    """The kind of devices of this build of torch, as in ``torch.device.type``; cuda if it has none."""
    found = torch.accelerator.current_accelerator()
    return "cuda" if found is None else found.type


def to_device(device: Device) -> torch.device:
    """The device that `device` names.

    Raises DeviceMapError for an invalid name. A number, also as text, is the index of a device of `accelerator_kind`.
    Every device but the cpu has an index; the default is the first device (torch's default is the current device at a
    later time). The cpu has none: for torch ``cpu:0`` is another device.
    """
    kind, index = _parts(device)
    try:
        made = torch.device(kind)
    except RuntimeError:
        raise _no_device(device) from None
    return CPU if made.type == "cpu" else torch.device(made.type, index)


def _parts(device: object) -> tuple[str, int]:
    """Kind and index, which torch does not check: it takes ``cuda:300`` for ``cuda:44``."""
    if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
        raise _no_device(device)
    text = str(device)
    if isinstance(device, int) or (text.isascii() and text.removeprefix("-").isdecimal()):
        text = f"{accelerator_kind()}:{text}"
    kind, colon, number = text.partition(":")
    if number.startswith("-"):
        raise DeviceMapError(f"Device index must not be negative, but got {_short(device)}")
    if not colon:
        return kind, 0
    if not (number.isascii() and number.isdecimal() and len(number) <= 3) or str(int(number)) != number:
        raise _no_device(device)
    if int(number) >= _MOST_DEVICES:
        raise DeviceMapError(f"{_short(device)} is no device: the highest index is {_MOST_DEVICES - 1}")
    return kind, int(number)


def _no_device(device: object) -> DeviceMapError:
    return DeviceMapError(f"{_short(device)} is no device; a device is like 0, 'cuda:0', 'cpu', torch.device('cuda:0')")


def _short(value: object) -> str:
    return repr(value)[:80]


def to_devices(devices: Iterable[Device]) -> list[torch.device]:
    """The named devices; DeviceMapError for a device that is not of `accelerator_kind`. Init refuses duplicates."""
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        raise DeviceMapError(f"devices must be a list of devices, not {_short(devices)}")
    made = [to_device(device) for device in devices]
    kind = accelerator_kind()
    for device in made:
        if device.type != kind:
            raise DeviceMapError(
                f"`set_devices` expect a list of {kind.upper()} devices, but got device type {device.type}. "
                "Nothing needs to be said of others"
            )
    return made


def to_device_map(mapping: Mapping[Any, Device]) -> DeviceMap:
    """A map of devices from here to there; DeviceMapError unless it is one-to-one. Either side may be the cpu."""
    return _joined({}, mapping, "device_map")


def to_device_maps(maps: Mapping[str, Mapping[Any, Device]]) -> dict[str, DeviceMap]:
    """Device maps, by the names of the workers they lead to. Init checks whether each is one-to-one."""
    return {
        _checked_name(name): _joined({}, mapping, "device_map", one_to_one=False)
        for name, mapping in _entries(maps, "device_maps").items()
    }


def extend_device_map(known: Mapping[Any, Device], more: Mapping[Any, Device]) -> DeviceMap:
    """Both maps as one; DeviceMapError if they contradict each other.

    As in torch, only init finds two sources for one target, one in either map.
    """
    return _joined(_joined({}, known, "", one_to_one=False), to_device_map(more), "set_device_map", one_to_one=False)


def _joined(known: DeviceMap, more: Mapping[Any, Device], what: str, *, one_to_one: bool = True) -> DeviceMap:
    joined = dict(known)
    for key, value in _entries(more, "a device map").items():
        source, target = to_device(key), to_device(value)
        problem = f"`{what}` only supports 1-to-1 mapping, trying to map {source}"
        if joined.get(source, target) != target:
            raise DeviceMapError(f"{problem} to {target} and {joined[source]}")
        others = [other for other, to in joined.items() if to == target and other != source]
        if others and one_to_one:
            raise DeviceMapError(f"{problem} and {others[0]} to {target}")
        joined[source] = target
    return joined


def _entries(mapping: object, what: str) -> Mapping[Any, Any]:
    if isinstance(mapping, Mapping):
        return mapping
    raise DeviceMapError(f"{what} must be a dictionary, not {_short(mapping)}")


def _checked_name(name: object) -> str:
    if isinstance(name, str) and 0 < len(name) < _LONGEST_NAME:
        return name
    raise DeviceMapError(f"device maps lead to workers by their names, not to {_short(name)}")


@dataclass(frozen=True)
class DeviceClaims:
    """A worker's devices, as it announces them when it joins. count: how many devices of its kind of accelerator it
    has. devices: the ones to use, if the options name some. maps: device maps by target worker. kind: as in
    ``torch.device.type``.

    DeviceMapError for invalid claims; `check_device_maps` checks whether those of a group fit together.
    """

    count: int = 0
    devices: tuple[torch.device, ...] = ()
    maps: Mapping[str, DeviceMap] = field(default_factory=dict, hash=False)
    kind: str = "cuda"

    def __post_init__(self) -> None:
        if type(self.count) is not int or not 0 <= self.count <= _MOST_DEVICES:
            raise DeviceMapError(f"the number of devices is one from 0 to {_MOST_DEVICES}, not {_short(self.count)}")
        if self.kind == CPU.type or to_device(self.kind).type != self.kind:
            raise DeviceMapError(f"{_short(self.kind)} is no kind of accelerator")
        if len(self.maps) > _MOST_TARGETS or max(map(len, [self.devices, *self.maps.values()])) > _LONGEST_LIST:
            raise DeviceMapError(f"device maps for more than {_MOST_TARGETS} workers, or of more than {_LONGEST_LIST}")
        for name in self.maps:
            _checked_name(name)

    def has(self, device: torch.device) -> bool:
        """Whether the worker has a device. Each has a cpu."""
        return device == CPU or (device.type == self.kind and 0 <= (device.index or 0) < self.count)

    def to_json(self) -> list[object]:
        """The form `from_json` reads."""
        maps = {name: {str(a): str(b) for a, b in mapping.items()} for name, mapping in self.maps.items()}
        return [self.count, self.kind, [str(device) for device in self.devices], maps]

    @classmethod
    def from_json(cls, value: object) -> DeviceClaims:
        """The claims that `to_json` made; DeviceMapError for anything else."""
        match value:
            case [int(count), str(kind), list(devices), dict(maps)]:
                return cls(count, tuple(map(_read, devices)), {to: _read_map(each) for to, each in maps.items()}, kind)
        raise DeviceMapError(f"{_short(value)} says nothing of devices")


def _read(text: object) -> torch.device:
    """The device of a text in the canonical form: no two keys of a map can mean the same device."""
    device = to_device(text) if isinstance(text, str) else None
    if device is None or str(device) != text:
        raise _no_device(text)
    return device


def _read_map(value: object) -> DeviceMap:
    return {_read(source): _read(target) for source, target in _entries(value, "a device map").items()}


def check_device_maps(claims: Mapping[str, DeviceClaims], fixed: bool = True) -> None:
    """Raise DeviceMapError, naming the worker, if the claims of a group do not fit together.

    claims: by name, in the same order at all members: all raise the same error. fixed: no other members will come, so
    maps may lead only to these.
    """
    for name, own in claims.items():
        _check_devices(name, own)
    for name, own in claims.items():
        strangers = [target for target in own.maps if target not in claims]
        if fixed and strangers:
            raise DeviceMapError(
                f"Node {name} has invalid target node names in its device maps\n"
                f"There is no {_listed(strangers)}; there are {_listed(claims)}"
            )
        for target, mapping in own.maps.items():
            _check_map(name, target, mapping, claims)


def _check_devices(name: str, own: DeviceClaims) -> None:
    twice = _repeated(own.devices)
    if twice:
        raise DeviceMapError(f"Node {name} has duplicated devices\nMore than once: {_listed(twice)}")
    missing = [device for device in own.devices if not own.has(device)]
    if missing:
        raise DeviceMapError(f"Node {name} has devices with invalid indices\n{_lacks(name, own, missing)}")


def _check_map(name: str, target: str, mapping: DeviceMap, claims: Mapping[str, DeviceClaims]) -> None:
    where = f"in its device map for {target}"
    twice = _repeated(mapping.values())
    if twice:
        raise DeviceMapError(f"Node {name} has duplicated target devices {where}\nMore than once: {_listed(twice)}")
    for side, holder, devices in (("source", name, mapping.keys()), ("target", target, mapping.values())):
        found = claims.get(holder)
        if found is None:
            continue  # it may join later; checked then
        # Unlike torch, allow the cpu in a map although the devices that are set cannot contain it.
        unexpected = [device for device in devices if found.devices and device not in (CPU, *found.devices)]
        if unexpected:
            raise DeviceMapError(
                f"Node {name} has unexpected {side} devices {where}\n"
                f"Not among the devices set for {holder}, {_listed(found.devices)}: {_listed(unexpected)}"
            )
        missing = [device for device in devices if not found.has(device)]
        if missing:
            raise DeviceMapError(
                f"Node {name} has {side} devices with invalid indices {where}\n{_lacks(holder, found, missing)}"
            )


def _repeated(devices: Collection[torch.device]) -> list[torch.device]:
    listed = list(devices)
    return [device for device in dict.fromkeys(listed) if listed.count(device) > 1]


def _lacks(name: str, own: DeviceClaims, missing: Sequence[torch.device]) -> str:
    return f"{name} has no {_listed(missing)}; its {own.kind} devices are {own.count} in number"


def _listed(items: Collection[object]) -> str:
    first = [str(item) for item in items][:8]
    return ", ".join(first) + (f" and {len(items) - len(first)} more" if len(items) > len(first) else "")


def devices_used(name: str, claims: Mapping[str, DeviceClaims]) -> list[torch.device]:
    """The devices that a worker uses for its calls, without the cpu, sorted.

    They are the ones that it has set; by default the targets of its own maps and of others' maps to it.
    """
    own = claims[name]
    used = set(own.devices)
    if not used:
        used.update(*own.maps.values())
        used.update(*(other.maps[name].values() for other in claims.values() if name in other.maps))
    return sorted(used - {CPU}, key=lambda device: (device.type, device.index))
