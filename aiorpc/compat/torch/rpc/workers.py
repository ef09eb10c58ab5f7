"""torch's WorkerInfo, which checks the name when a program makes one."""

from __future__ import annotations

from typing import Any

from ....protocol.identity import WorkerInfo as Info
from ....protocol.identity import check_name

__all__ = ["WorkerInfo"]


class _Kind(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, Info)


class WorkerInfo(metaclass=_Kind):
    """``WorkerInfo(name, id)`` makes an `aiorpc.WorkerInfo`, and those are its instances.

    RuntimeError for a name that no worker can have.
    """

    def __new__(cls, name: str, id: int) -> Any:
        return Info(check_name(name), id)
