"""torch's key-value stores as a meeting place: where it is, hosting or reaching it, and bounded access to it.

Everything here blocks: call it in a helper thread, never on a loop.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

from torch.distributed import FileStore, PrefixStore, Store, TCPStore

from ...errors import PeerRefused, RendezvousError, RpcUsageError, StoreGone
from .watch import FileWatch, ServerWatch, Watch, other_language, stranger

_FIRST_PAUSE, LAST_PAUSE = 0.002, 0.05
_LONGEST_ATTEMPT = 30.0
_CLOSING = "closing"
# Addresses that nobody has (RFC 5737, RFC 3849): they stand for the rest of the world where a route is asked for.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
_LOOPBACK = ("127.0.0.1", "::1")
_DIGITS = 18
_CAN_WRITE = (
    "Whoever reaches that store can write there, and so keep a group from forming, but not join it: another program "
    "that uses the store, or somebody who is no member. Meet at another port or in a file where only you can write"
)
T = TypeVar("T")


class Patience:
    """A deadline, and an event that ends all waiting.

    seconds: how long from now; 0 means no limit. stop: waits end with RendezvousError once it is set. place, trouble:
    what is waited for, and what has been in the way of that last, for whoever ends the waiting from outside; empty if
    nothing is known. Any thread may read them.
    """

    def __init__(self, seconds: float, stop: threading.Event | None = None) -> None:
        self.seconds = seconds
        self.place = self.trouble = ""
        self._deadline = time.monotonic() + seconds if seconds else float("inf")
        self.stop = stop or threading.Event()

    def left(self) -> float:
        """Seconds left, not below 0; infinite without a limit."""
        return max(0.0, self._deadline - time.monotonic())

    def attempt(self) -> float:
        """Seconds one attempt of something that is tried again may take."""
        return max(0.05, min(self.left(), _LONGEST_ATTEMPT))

    def tries(self) -> Iterator[None]:
        """Yield at least once, then again after ever longer pauses, until the time is up."""
        pause = _FIRST_PAUSE
        while True:
            if self.stop.is_set():
                raise RendezvousError("joining the group was stopped")
            yield
            left = self.left()
            if left <= 0:
                return
            self.stop.wait(min(pause, left))
            pause = min(pause * 1.5, LAST_PAUSE)


@dataclass(frozen=True)
class MeetingPlace:
    """Where the workers meet. path is for files; host, port and agent (torchrun owns the store) for TCP."""

    rank: int | None
    world_size: int | None
    path: str = ""
    host: str = ""
    port: int = 0
    agent: bool = False

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
    try:
        place.host.encode("idna")  # as looking it up does, which lets this error through
    except UnicodeError as error:
        where = "MASTER_ADDR" if url.scheme == "env" else "init_method"
        raise RpcUsageError(f"{where} names no host: {place.host[:80]!r} can be no name of one ({error})") from None
    check_ranks(place.rank, place.world_size)
    return place


def check_ranks(rank: int | None, world_size: int | None) -> None:
    """RpcUsageError if the two are no numbers or cannot belong together, whatever the others say."""
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
    def variable(name: str) -> str:
        if not environ.get(name):
            raise RendezvousError(f"init_method env:// needs the environment variable {name}, which is not set")
        return environ[name]

    return MeetingPlace(
        rank=_number(variable("RANK"), "RANK") if rank is None else rank,
        world_size=_number(variable("WORLD_SIZE"), "WORLD_SIZE") if world_size is None else world_size,
        host=variable("MASTER_ADDR"),
        port=_number(variable("MASTER_PORT"), "MASTER_PORT", 1, 65_535),
        agent=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


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


class Board:
    """A torch store, its keys under one prefix, whose every failure is a RendezvousError.

    Safe to use from several threads. Nothing here waits for a key: `get` of a missing key is None. watch: looked at
    before each operation; where the store has gone, torch would block or fill the log.
    """

    def __init__(self, store: Store, place: str, watch: Watch | None = None) -> None:
        self._store: Store | None = PrefixStore("aiorpc", store)
        self._place = place
        self._watch = watch
        self._end = f"the rendezvous at {place} was closed by this worker"

    def _call(self, function: Callable[[Store], T]) -> T:
        store, watch = self._store, self._watch
        if store is not None and watch is not None and (reason := watch.gone()):
            self.close(f"the store at {self._place} has gone: {reason}")
            store = None
        if store is None:
            raise StoreGone(self._end)
        try:
            return function(store)
        except RuntimeError as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            # Whoever keeps the error keeps the frames that it came through, and they are not to keep the connection.
            cause = error.with_traceback(None)
            raise StoreGone(f"the store at {self._place} no longer answers: {reason}") from cause
        finally:
            del store

    def rubbish(self, key: str, what: str) -> RendezvousError:
        """The error for what no worker has written, with who can have done it."""
        return RendezvousError(
            f"the rendezvous store at {self._place} holds {what} under aiorpc/{key}, which no worker has written "
            f"there. {_CAN_WRITE}"
        )

    def has(self, *keys: str) -> bool:
        """True if all these keys exist."""
        return self._call(lambda store: bool(store.check(list(keys))))

    def get(self, key: str) -> str | None:
        """The value of a key, None if there is none."""
        # A bare get would wait for the key, and block every other operation of this client meanwhile.
        return self._text(key, self._call(lambda store: store.get(key))) if self.has(key) else None

    def number(self, key: str) -> int:
        """The value of a key that counts something, 0 if there is none."""
        text = self.get(key) or "0"
        if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS):
            raise self.rubbish(key, "no number")
        return int(text)

    def load(self, key: str, text: str, shape: Callable[[Any], T]) -> T:
        """What `shape` makes of the JSON that stands under a key; it may raise what reading something else raises."""
        try:
            return shape(json.loads(text))
        except PeerRefused as error:
            raise RendezvousError(f"cannot meet at {self._place}: {error}") from None
        except RendezvousError as error:
            raise self.rubbish(key, str(error)) from None
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            raise self.rubbish(key, f"something else ({type(error).__name__}: {error!s:.200})") from None

    def _text(self, key: str, value: bytes) -> str:
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise self.rubbish(key, "no text") from None

    def get_all(self, keys: list[str]) -> list[str]:
        """The values of keys that have to exist."""
        if not self.has(*keys):  # to read one that is missing would wait for it
            raise RendezvousError(f"the rendezvous store at {self._place} lacks what it has to have: {_CAN_WRITE}")

        def read(store: Store) -> list[bytes]:
            extended = store.has_extended_api()  # type: ignore[attr-defined]  # not in torch's stubs
            return store.multi_get(keys) if extended else [store.get(key) for key in keys]

        return [self._text(key, value) for key, value in zip(keys, self._call(read), strict=True)]

    def put(self, key: str, value: str) -> None:
        """Set a key."""
        self._call(lambda store: store.set(key, value))

    def swap(self, key: str, expected: str, desired: str) -> str:
        """Set a key to `desired` if it is `expected` ("" for missing); return what it holds afterwards."""
        return self._text(key, self._call(lambda store: store.compare_set(key, expected, desired)))

    def count(self, key: str) -> int:
        """Add one to a counter and return its new value."""
        try:
            return self._call(lambda store: store.add(key, 1))
        except (ValueError, IndexError):
            raise self.rubbish(key, "no number") from None

    def check_open(self) -> None:
        """StoreGone if the process that hosts the store has said that it is about to end it."""
        if self.has(_CLOSING):
            raise StoreGone(f"the store at {self._place} is being closed")

    def set_closing(self, closing: bool) -> None:
        """Announce the end of the store, or take that back."""
        if closing:
            self.put(_CLOSING, "1")
        else:
            self._call(lambda store: store.delete_key(_CLOSING))

    def close(self, reason: str = "") -> None:
        """Let go of the store; a server that this was the last user of ends. Idempotent.

        reason: what operations that come later say, in place of that this worker has closed it.
        """
        self._store = None
        self._end = reason or self._end
        if self._watch is not None:
            self._watch.close()


def open_file(place: MeetingPlace) -> Board:
    """The file store at the place's path; its folder must exist."""
    folder = os.path.dirname(os.path.abspath(place.path))
    # torch retries for minutes on a path it cannot open.
    target = place.path if os.path.exists(place.path) else folder
    if not os.path.isdir(folder) or os.path.isdir(place.path) or not os.access(target, os.R_OK | os.W_OK):
        raise RendezvousError(f"cannot open the rendezvous file {place.path}: no such folder, or no permission")
    try:
        # Without a worker count the file outlives its users, so that they can meet there again.
        store = FileStore(place.path, -1)
    except RuntimeError as error:  # it writes into it
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RendezvousError(f"cannot open the rendezvous file {place.path}: {reason}") from error
    try:
        return Board(store, str(place), FileWatch(place.path))
    except OSError as error:
        raise StoreGone(f"the rendezvous file {place.path} has gone: {error}") from None


def open_tcp(place: MeetingPlace, patience: Patience) -> tuple[Board, bool]:
    """The TCP store at the place, and whether this process hosts it.

    Rank 0 hosts. Where ranks are free, so does whoever finds its own address and nobody there. If another process
    turns out to have the port, it is taken for the host for as long as it has it: the store of a job that is just
    ending goes away. RendezvousError if the time passes without a store.
    """
    if place.agent or place.rank not in (0, None) or not (place.world_size or is_local(place, patience)):
        return reach_tcp(place, patience), False
    visitor = _Visitor(place, patience)
    for _ in patience.tries():
        if place.world_size or not listens(place):
            try:
                return Board(_host_tcp(place, patience), str(place)), True
            except TimeoutError:
                patience.trouble = "no answer"
            except RuntimeError as error:
                patience.trouble = str(error).splitlines()[0]
        if listens(place):
            board = visitor.visit()
            if board is not None:
                return board, False
    raise RendezvousError(f"cannot host the store at {place} within {patience.seconds:g} s: {patience.trouble}")


def serve(host: str, port: int) -> tuple[Store, int]:
    """The server of a store at a local address, and its port; RendezvousError if that cannot be had.

    It ends when nobody refers to what is returned any more.
    """
    if not 0 <= port < 1 << 16:
        raise RendezvousError(f"cannot listen at {host!r}, port {port}: ports are from 0 to 65535")
    try:
        family, dual = socket.AF_INET6 if ":" in host else socket.AF_INET, host == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server((host, port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise RendezvousError(f"cannot listen at {host!r}, port {port}: {error}") from None
    with listener:
        port = int(listener.getsockname()[1])
        near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        limit = timedelta(seconds=_LONGEST_ATTEMPT)
        return TCPStore(near, port, None, True, limit, False, False, master_listen_fd=listener.detach()), port


def _host_tcp(place: MeetingPlace, patience: Patience) -> Store:
    addresses, local = _addresses(place, patience), is_local(place, patience)
    host = addresses[0] if addresses else place.host
    limit = timedelta(seconds=max(1.0, patience.attempt()))
    with _listener(place, addresses, local) or contextlib.nullcontext() as listener:
        if not local:
            _check_leads_here(place, patience)
        descriptor = listener.detach() if listener else None
    # A store that torch already serves in this process on that port (for a process group) is shared.
    make = partial(TCPStore, host, place.port, None, True, limit, False, True, master_listen_fd=descriptor)
    return bounded(make, patience.attempt())


def _listener(place: MeetingPlace, addresses: list[str], local: bool) -> socket.socket | None:
    """A socket for torch to serve the store on; None where its own will do, or where the port is taken."""
    with contextlib.suppress(OSError):
        if not local:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            return socket.create_server(("", place.port), family=family, backlog=512, dualstack_ipv6=dual)
        # torch listens on all interfaces, which a group that lives on one host has no need of.
        named = place.host == "localhost" or place.host == addresses[0]
        if len(addresses) == 1 and named and ipaddress.ip_address(addresses[0]).is_loopback:
            family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
            return socket.create_server((addresses[0], place.port), family=family, backlog=512)
    return None


def _check_leads_here(place: MeetingPlace, patience: Patience) -> None:
    """RuntimeError if nobody answers at the place, where this host listens under an address not its own.

    Behind a translated address (a container's, a service's) that may still be right. torch connects to its own store
    with no way to end that, so a wrong address would leave a thread and an open port behind.
    """
    try:
        socket.create_connection((place.host, place.port), min(patience.attempt(), 5.0)).close()
    except socket.gaierror as error:
        raise RuntimeError(_unresolved(place, error)) from error
    except OSError as error:
        raise RuntimeError(f"{place.host} is no address of this host and does not lead to it ({error})") from error


def reach_tcp(place: MeetingPlace, patience: Patience) -> Board:
    """A client of the store at the place, tried until it answers or the time is up (RendezvousError).

    What answers and is no torch store is told at once.
    """
    patience.trouble = patience.trouble or f"nobody has been reached yet; {place.host!r} may be long to look up"
    visitor = _Visitor(place, patience)
    for _ in patience.tries():
        board = visitor.visit()
        if board is not None:
            return board
    raise RendezvousError(f"cannot reach the store at {place} within {patience.seconds:g} s: {patience.trouble}")


class _Visitor:
    """Goes to the store at a place, as often as it is told to."""

    def __init__(self, place: MeetingPlace, patience: Patience) -> None:
        self._place, self._patience = place, patience
        self._asked = False  # whether what listens there was asked for its language

    def visit(self) -> Board | None:
        """A client of the store; None if nobody answers now, for a reason that then stands in the patience.

        RendezvousError if what answers is no torch store.
        """
        place, patience = self._place, self._patience
        # torch's client logs each failed attempt, and waits without limit for a server that never speaks.
        try:
            with socket.create_connection((place.host, place.port), min(patience.attempt(), 5.0)) as probe:
                address = str(probe.getpeername()[0])
                other = stranger(probe, patience.attempt())
            if other:
                raise RendezvousError(f"cannot meet at {place}: {other}")
            watch = ServerWatch(address, place.port)
            try:
                limit = timedelta(seconds=max(1.0, patience.attempt()))
                make = partial(TCPStore, address, place.port, None, False, limit, False)
                return Board(bounded(make, patience.attempt()), str(place), watch)
            except BaseException:
                watch.close()
                raise
        except RendezvousError:
            raise
        except TimeoutError:
            patience.trouble = (
                "no answer from what listens there; if that is no store of torch, another program has the port"
            )
            other = "" if self._asked else other_language(place.host, place.port, patience.attempt())
            self._asked = True
            if other:
                raise RendezvousError(f"cannot meet at {place}: {other}") from None
        except socket.gaierror as error:
            patience.trouble = _unresolved(place, error)
        except (OSError, RuntimeError) as error:
            patience.trouble = str(error).splitlines()[0]
        return None


def bounded(make: Callable[[], T], seconds: float) -> T:
    """Run `make` in a thread and return what it returns; TimeoutError after so many seconds.

    The thread is a daemon and may be left behind, waiting inside torch for a server that never answers.
    """
    results: list[T | BaseException] = []
    thread = threading.Thread(target=_append_outcome, args=(results, make), daemon=True, name="aiorpc-store")
    thread.start()
    thread.join(seconds)
    if not results:
        raise TimeoutError
    result = results.pop()
    if isinstance(result, BaseException):
        raise result
    return result


def _append_outcome(results: list[T | BaseException], make: Callable[[], T]) -> None:
    try:
        results.append(make())
    except BaseException as error:
        results.append(error)
    finally:
        del results  # the error has this frame: a store in a circle would live until there is garbage collection


def listens(place: MeetingPlace) -> bool:
    """Whether something accepts connections at the place just now."""
    with contextlib.suppress(OSError), socket.create_connection((place.host, place.port), 1.0):
        return True
    return False


def is_local(place: MeetingPlace, patience: Patience | None = None) -> bool:
    """Whether the place's address belongs to this host."""
    for address in _addresses(place, patience):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
            return True
    return False


def is_loopback(place: MeetingPlace) -> bool:
    """Whether the place has a name or an address that can be reached from this host alone."""
    # Not by what a name stands for: to its own host that of a host may stand for 127.0.1.1.
    try:
        return ipaddress.ip_address(place.host).is_loopback
    except ValueError:
        return place.host == "localhost"


def local_address(place: MeetingPlace) -> str:
    """Address of the interface that reaches the place; a loopback one where there is no network in between.

    Where the name of this host stands for a loopback address here, as with Debian, others are led to that of the
    interface towards the rest of the world.
    """
    addresses = _addresses(place) if place.host else []
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


def _addresses(place: MeetingPlace, patience: Patience | None = None) -> list[str]:
    """The addresses that the place's host stands for; none if it cannot be resolved, which may take long to find out.

    patience: is told of that, and of its beginning.
    """
    before = patience.trouble if patience is not None else ""
    if patience is not None:
        patience.trouble = before or f"looking up the name {place.host!r} has not come to an end"
    try:
        found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    except OSError as error:
        if patience is not None:
            patience.trouble = _unresolved(place, error)
        return []
    if patience is not None:
        patience.trouble = before
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _unresolved(place: MeetingPlace, error: OSError) -> str:
    return f"the name {place.host!r} cannot be resolved ({error})"
