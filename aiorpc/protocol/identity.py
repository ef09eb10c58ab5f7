"""Who a worker is: its public name and number, and the full record that peers exchange. Pure data, no I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated

import msgspec

from ..errors import ProtocolError, RpcUsageError
from ..rights import check_role
from .packing import MALFORMED, compiled, is_text, malformed
from .registered import register_safe

NAME_LIMIT = 128
_NAME = re.compile(r"[A-Za-z0-9\-_:]*")
_TEXT_LIMIT = 4096
VERSION_LIMIT = 64
UNUSABLE = "!"
ID_LIMIT = 1 << 31

_Text = Annotated[str, msgspec.Meta(max_length=_TEXT_LIMIT)]
_Version = Annotated[str, msgspec.Meta(max_length=VERSION_LIMIT)]
_Id = Annotated[int, msgspec.Meta(ge=0, lt=ID_LIMIT)]
#: The fields of a `WorkerRecord`, as they travel in calls of the runtime's own.
RecordFields = Annotated[list[str | int], msgspec.Meta(max_length=32)]


def check_name(name: object) -> str:
    """Return `name` if it can name a worker; raise RpcUsageError with the reason otherwise."""
    return _check("Worker", name)


def check_object_name(name: object) -> str:
    """Return `name` if an object can be served under it; raise RpcUsageError with the reason otherwise."""
    return _check("Object", name)


def legible(text: str) -> str:
    """A text for people, such as the name of a host, in a form that a record may have.

    The kernel accepts any bytes as the name of a host. Bytes that are not UTF-8 come as lone surrogates, which no
    record can carry, and control characters would reach the terminals of others.
    """
    return "".join(each if each.isprintable() else "?" for each in text[:_TEXT_LIMIT])


def _check(what: str, name: object) -> str:
    if not isinstance(name, str):
        raise RpcUsageError(f"{what} name must be a string, but got {name!r}")
    if not name:
        raise RpcUsageError(f"{what} name must be non-empty.")
    if len(name) >= NAME_LIMIT:
        raise RpcUsageError(f"{what} name must be shorter than {NAME_LIMIT} characters, but got {len(name)}.")
    if not _NAME.fullmatch(name):
        raise RpcUsageError(f"{what} name must match ^[A-Za-z0-9-_:]*$, but got {name!r}")
    return name


@register_safe
@dataclass(frozen=True, order=True, repr=False)
class WorkerInfo:
    """Name and id of a worker. Verbs take it wherever they take a name. Hashable, comparable, picklable.

    name: unique in the group. id: the rank, or the number that the group gave.
    """

    name: str
    id: int

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


@dataclass(frozen=True)
class WorkerRecord:
    """All that others need to know to reach a worker and to tell whether it still lives.

    name: as in WorkerInfo. id: its number in the group, which no other worker of the group has or had. incarnation:
    random hex, new for every init. host: identity of the host, its namespaces and its user (equal on both sides: unix
    sockets and pidfd work). hostname, pid: for people. main: identity of the main module. unix_path: path of its unix
    socket, "" if none. tcp_host, tcp_port: where it listens, port 0 if nowhere. role: the role that it claims in the
    group, for which others decide what they run; "" for none. tls: "1.3" if it speaks TLS over TCP; "" if it does not.
    After `UNUSABLE` comes the reason why it cannot: such a worker joins only to tell the others, which would wait for
    it. rank: its place in the group, the id of its WorkerInfo. It equals the id, except in a worker that has taken the
    place of a lost one. python, torch, aiorpc: the versions that it runs; "" if unknown.
    """

    name: _Text
    id: _Id
    incarnation: _Text
    host: _Text
    hostname: _Text
    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]
    main: _Text
    unix_path: _Text
    tcp_host: _Text
    tcp_port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    role: _Text = ""
    tls: _Text = ""
    rank: _Id = -1  # the id, if it is not given
    python: _Version = ""
    torch: _Version = ""
    aiorpc: _Version = ""

    def __post_init__(self) -> None:
        if self.rank < 0:
            object.__setattr__(self, "rank", self.id)

    @property
    def info(self) -> WorkerInfo:
        """The public part."""
        return WorkerInfo(self.name, self.rank)

    def describe(self) -> str:
        """One phrase for error messages: name, rank, pid and host name."""
        return f"{self.name} (rank {self.rank}, pid {self.pid} on {self.hostname})"

    @property
    def minor(self) -> str:
        """The minor version of Python, on which code that travels by value depends, as "3.11"; "" if it is unknown."""
        return ".".join(self.python.split(".")[:2])

    def to_wire(self) -> list[str | int]:
        """A flat list of strings and integers, in the order of the fields."""
        return [getattr(self, name) for name in _FIELDS]

    @classmethod
    def from_wire(cls, value: object) -> WorkerRecord:
        """The record that `to_wire` made; ProtocolError names the first part that is malformed."""
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or len(value) != len(_FIELDS):
            raise ProtocolError(f"a worker record is a list of {len(_FIELDS)} items, not {type(value).__name__}")
        try:
            record = msgspec.convert(dict(zip(_FIELDS, value, strict=True)), cls)
        except MALFORMED as error:
            raise malformed("a worker record", error) from None
        if not all(is_text(each) for each in value if isinstance(each, str)):
            raise ProtocolError("a worker record with text that is no UTF-8")
        # The errors of these functions would show the text of another process.
        try:
            check_name(record.name)
        except RpcUsageError:
            raise ProtocolError("worker record: name must be one that a worker can have") from None
        try:
            check_role(record.role)
        except RpcUsageError:
            raise ProtocolError("worker record: role must be one that a worker can have") from None
        return record


_FIELDS = tuple(each.name for each in fields(compiled(WorkerRecord)))
