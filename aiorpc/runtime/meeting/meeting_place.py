"""The meeting place that `init_method` names, and how this host sees its address.

Functions that look up names block: call them in a helper thread, never on a loop.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit

from ...errors import RendezvousError, RpcUsageError
from ...transport import sockets
from . import launchers
from .launchers import Launched, Spot
from .patience import Patience

# Addresses for documentation (RFC 5737, RFC 3849), to ask the kernel for the route to the rest of the world.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
_LOOPBACK = ("127.0.0.1", "::1")


@dataclass(frozen=True)
class MeetingPlace:
    """A meeting place. path is for files; host, port and agent (torchrun owns the store) for TCP. launched: what a
    launcher said of this process. job: of it, if the place follows from the job alone (`job_place`); ports: those at
    which it may meet, of which `port` is one."""

    rank: int | None
    world_size: int | None
    path: str = ""
    host: str = ""
    port: int = 0
    agent: bool = False
    launched: Launched | None = None
    job: str = ""
    ports: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.path:
            return f"file://{self.path}"
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}" if self.host else "(given)"


def parse(init_method: str, rank: int | None, world_size: int | None, environ: Mapping[str, str]) -> MeetingPlace:
    """The meeting place a URL describes; a rank and world size given as arguments win over URL and environment.

    Raises RpcUsageError for a URL or number that makes no sense, RendezvousError for a missing environment variable.
    """
    if not isinstance(init_method, str) or "\0" in init_method:
        raise RpcUsageError(f"init_method must be a URL, not {init_method!r:.80}")
    try:
        url = urlsplit(init_method)
    except ValueError as error:
        raise RpcUsageError(f"init_method is no URL ({error}): {init_method!r}") from None
    query = {key: values[-1] for key, values in parse_qs(url.query).items()}
    rank = _number(query["rank"], "rank in init_method") if rank is None and "rank" in query else rank
    if world_size is None and "world_size" in query:
        world_size = _number(query["world_size"], "world_size in init_method")
    if url.scheme == "env" and (other := environ.get("AIORPC_INIT_METHOD")):
        if other.startswith("env:"):
            raise RpcUsageError(f"AIORPC_INIT_METHOD is {other!r}: it has to start with tcp:// or file://")
        return parse(other, rank, world_size, environ)
    if url.scheme == "env":
        place = _from_environment(rank, world_size, environ)
    elif url.scheme == "tcp":
        place = MeetingPlace(rank, world_size, host=url.hostname or "", port=_port(url.netloc, init_method))
    elif url.scheme == "file":
        place = MeetingPlace(rank, world_size, path=unquote(url.netloc + url.path))
    else:
        raise RpcUsageError(f"init_method must start with env://, tcp:// or file://, not {init_method!r}")
    if url.scheme != "env" and not (place.path or place.host):
        raise RpcUsageError(f"init_method names no {'path' if url.scheme == 'file' else 'host'}: {init_method!r}")
    where = "MASTER_ADDR" if url.scheme == "env" else "init_method"
    try:
        place.host.encode("idna")  # looking it up would raise this error, too
    except UnicodeError as error:
        raise RpcUsageError(f"{where} names no host: {place.host[:80]!r} can be no name of one ({error})") from None
    if _is_of_one_link(place.host):
        raise RpcUsageError(
            f"{where} names {place.host!r}, an address within one link, which each host names by an interface of its "
            "own: torch's store is not reached there. Name one that all hosts know alike"
        )
    check_ranks(place.rank, place.world_size)
    return place


def _is_of_one_link(host: str) -> bool:
    """Whether it is an IPv6 address that means nothing without an interface. IPv4 addresses need none."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a name
        return False
    return address.version == 6 and address.is_link_local


def check_ranks(rank: int | None, world_size: int | None) -> None:
    """RpcUsageError if the two are no numbers or do not fit together."""
    for name, number in (("rank", rank), ("world_size", world_size)):
        if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
            raise RpcUsageError(f"{name} must be an integer, not {number!r}")
    if world_size is not None and world_size < 1:
        raise RpcUsageError(f"world_size must be at least 1, not {world_size}")
    if rank is not None and rank < 0:
        raise RpcUsageError(f"rank must not be negative, but is {rank}")
    if rank is None and world_size is not None:
        raise RpcUsageError(f"rank is needed when world_size ({world_size}) is given")


def _from_environment(rank: int | None, world_size: int | None, environ: Mapping[str, str]) -> MeetingPlace:
    """That of torchrun's variables, which may be set by hand, or that of another launcher."""

    def variable(name: str) -> str:
        if not environ.get(name):
            raise RendezvousError(
                f"init_method env:// needs the environment variable {name}, which is not set. {launchers.hint(environ)}"
                "Start the program with torchrun, which sets it, or with another launcher that is known (Slurm's srun, "
                "mpirun, an Indexed Job; the documents list them), or say rank=, world_size= and init_method= yourself "
                "(init_rpc takes the last one in RpcBackendOptions)"
            )
        return environ[name]

    launched = None
    named = bool(environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"))
    if not (named and rank is not None and world_size is not None):
        launched = launchers.found(environ)
    if launched is not None:
        rank, size = launched.rank if rank is None else rank, launchers.size_for(launched, world_size)
        spot = None if named else launchers.spot_of(launched, environ)
        if spot is not None:
            return _of_launcher(launched, spot, rank, size)
        world_size = size
    return MeetingPlace(
        rank=_number(variable("RANK"), "RANK") if rank is None else rank,
        world_size=_number(variable("WORLD_SIZE"), "WORLD_SIZE") if world_size is None else world_size,
        host=variable("MASTER_ADDR"),
        port=_number(variable("MASTER_PORT"), "MASTER_PORT", 1, 65_535),
        agent=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        launched=launched,
    )


def _of_launcher(launched: Launched, spot: Spot, rank: int, world_size: int) -> MeetingPlace:
    if launched.world_size not in (None, world_size):
        raise RendezvousError(
            f"world_size is {world_size}, and this process was started by {launched}: leave world_size out, or start "
            f"as many processes; or, if {launched.variables[0]} is left over in a shell, unset it there"
        )
    if spot.host:
        port = spot.ports[0]
        return MeetingPlace(rank, world_size, "", spot.host, port, launched=launched, job=spot.job, ports=spot.ports)
    name = hashlib.sha256(f"{launched.launcher} {spot.job}".encode()).hexdigest()[:16]
    path = str(sockets.private_directory() / f"meet-{name}" / "store")
    return MeetingPlace(rank, world_size, path, launched=launched, job=spot.job)


def _number(text: str, name: str, low: int = 0, high: int = 1 << 31) -> int:
    try:
        number = int(text)
    except ValueError:
        raise RpcUsageError(f"{name} must be an integer, not {text!r}") from None
    if not low <= number <= high:
        raise RpcUsageError(f"{name} must be between {low} and {high}, not {number}")
    return number


def _port(netloc: str, init_method: str) -> int:
    _, colon, port = netloc.rpartition(":")
    if not colon or port.endswith("]"):
        raise RpcUsageError(f"init_method names no port: {init_method!r}")
    return _number(port, "port in init_method", 1, 65_535)


def is_local(place: MeetingPlace, patience: Patience | None = None) -> bool:
    """Whether the place's address belongs to this host."""
    for address in addresses_of(place, patience):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
            return True
    return False


def is_loopback(place: MeetingPlace) -> bool:
    """Whether the place has a name or an address that can be reached from this host alone."""
    # A name is not looked up: a host may resolve its own name to 127.0.1.1.
    try:
        return ipaddress.ip_address(place.host).is_loopback
    except ValueError:
        return place.host == "localhost"


def local_address(place: MeetingPlace) -> str:
    """Address of the interface that reaches the place; a loopback one where there is no network in between.

    Where this host's own name stands for a loopback address, as on Debian, it is the address of the interface to the
    rest of the world.
    """
    addresses = addresses_of(place) if place.host else []
    if place.host and not is_loopback(place):
        addresses += _ELSEWHERE
    near = []
    for address in addresses:
        own = _own_address(address, place.port)
        if own is not None and not ipaddress.ip_address(own).is_loopback:
            return own
        near.append(own)
    if _LOOPBACK[0] in near:
        return _LOOPBACK[0]
    near += [_own_address(address, 1) for address in _LOOPBACK]  # some hosts have only one of them
    return next((own for own in near if own is not None), _LOOPBACK[0])


def _own_address(address: str, port: int) -> str | None:
    """The address from which this host reaches another one; None if it does not."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # Connecting a datagram socket sends nothing; it only asks the kernel for the route.
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return str(probe.getsockname()[0])
    return None


def addresses_of(place: MeetingPlace, patience: Patience | None = None) -> list[str]:
    """The addresses of the place's host; none if it cannot be resolved, which may take long.

    patience: its `trouble` says so, also while the look-up runs.
    """
    before = patience.trouble if patience is not None else ""
    if patience is not None:
        patience.trouble = before or f"looking up the name {place.host!r} has not come to an end"
    try:
        found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    except OSError as error:
        if patience is not None:
            patience.trouble = unresolved(place, error)
        return []
    if patience is not None:
        patience.trouble = before
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def unresolved(place: MeetingPlace, error: OSError) -> str:
    """For errors: that a name stands for no address."""
    return f"the name {place.host!r} cannot be resolved ({error})"
