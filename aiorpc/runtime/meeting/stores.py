"""torch's key-value stores: opening or hosting the one at a meeting place, and reaching it.

Everything here blocks: call it in a helper thread, never on a loop.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import NamedTuple, TypeVar

from torch.distributed import FileStore, PrefixStore, Store, TCPStore

from ...errors import RendezvousError, StoreGone
from .contact import Contact, Reached
from .key_value import KeyValueClient
from .meeting_place import MeetingPlace, addresses_of, is_local, unresolved
from .patience import LONGEST_ATTEMPT, Patience
from .watch import FileWatch, ServerWatch, connection_beside, connection_of, other_language, stranger

_OPENING = timedelta(seconds=5)  # torch opens the file for each operation, and would try for minutes if it is gone
_LISTENING = 2.5  # seconds to connect: a lost packet is sent again after one
_WRITING = 1.0  # seconds for writing an entry of a file
_LENGTH = struct.Struct("=I")  # of a string in torch's file
_MARK = "mark"  # this key has a random text, which identifies the store
T = TypeVar("T")


def open_file(place: MeetingPlace) -> KeyValueClient:
    """The file store at the place's path; its folder must exist."""
    folder = os.path.dirname(os.path.abspath(place.path))
    # torch retries for minutes on a path it cannot open.
    target = place.path if os.path.exists(place.path) else folder
    problem = ""
    if os.path.isdir(place.path):
        problem = "that is a folder; name a file in it, which need not be there"
    elif not os.path.isdir(folder):
        problem = f"there is no folder {folder}"
    elif not os.access(target, os.R_OK | os.W_OK):
        problem = f"no permission to read and write {target}"
    elif not _is_whole(place.path):
        problem = (
            "it holds something else than a store, or its last entry was cut off, as on a disk that was full; name "
            "another file, or remove this one"
        )
    if problem:
        raise RendezvousError(f"cannot open the rendezvous file {place.path}: {problem}")
    try:
        # Without a worker count the file outlives its users, who can meet there again.
        store = FileStore(place.path, -1)
        store.set_timeout(_OPENING)
    except RuntimeError as error:  # it writes into it
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RendezvousError(f"cannot open the rendezvous file {place.path}: {reason}") from error
    try:
        return KeyValueClient(store, str(place), FileWatch(place.path))
    except OSError as error:
        raise StoreGone(f"the rendezvous file {place.path} has gone: {error}") from None


def _is_whole(path: str) -> bool:
    """Whether torch can read the file to its end. If the last entry is cut off, torch waits for the rest without limit
    and with the interpreter lock, which stops this process.

    No file lock is taken: torch waits for it with the interpreter lock, and then this process could not release it. So
    a half-written entry may be read; only a file that stays cut off for a while counts.
    """
    size, since = -1, 0.0
    with contextlib.suppress(OSError):  # torch reports a file that cannot be read
        while not _ends_with_a_pair(path):
            before, size = size, os.stat(path).st_size
            if size != before:
                since = time.monotonic()
            elif time.monotonic() > since + _WRITING:
                return False
            time.sleep(_WRITING / 50)
    return True


def _ends_with_a_pair(path: str) -> bool:
    """Whether the file has strings alone, each after its length, keys and values in turn. True of irregular files."""
    with open(path, "rb") as file:
        status, at, strings = os.fstat(file.fileno()), 0, 0
        if not stat.S_ISREG(status.st_mode):
            return True
        while at < status.st_size:
            head = file.read(_LENGTH.size)
            if len(head) < _LENGTH.size:
                return False
            at = file.seek(_LENGTH.unpack(head)[0], os.SEEK_CUR)
            strings += 1
        return at == status.st_size and strings % 2 == 0


class Hosting(NamedTuple):
    """A store over TCP. hosted: whether this process serves it. ends: whether it ends with this worker; not if torch
    had served it in this process before, for a process group.
    """

    kv: KeyValueClient
    hosted: bool = False
    ends: bool = False


def open_tcp(place: MeetingPlace, patience: Patience, grace: float) -> Hosting:
    """The TCP store at the place.

    Rank 0 hosts it. In a free group the first worker at the place hosts it, if the address is its own. A process that
    has the port is taken for the host while it has it: the ending store of an earlier job goes away. RendezvousError if
    the time passes without a store.
    """
    if place.agent or place.rank not in (0, None) or not (place.world_size or is_local(place, patience)):
        return Hosting(reach_tcp(place, patience, grace))
    visitor = Visitor(place, patience, grace)
    for _ in patience.tries():
        if place.world_size or not listens(place):
            try:
                before = is_taken(place.port)  # if torch hosts below all the same, this process had it
                return Hosting(KeyValueClient(_host_tcp(place, patience), str(place)), True, not before)
            except TimeoutError:
                patience.trouble = "no answer"
            except RuntimeError as error:
                patience.trouble = str(error).splitlines()[0]
        if listens(place):
            kv = visitor.visit()
            if kv is not None:
                return Hosting(kv)
    raise RendezvousError(f"cannot host the store at {place} within {patience.seconds:g} s: {patience.trouble}")


def serve(host: str, port: int) -> tuple[Store, int]:
    """The server of a store at a local address, and its port; RendezvousError if that cannot be had.

    It ends with the last reference to the returned store.
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
        limit = timedelta(seconds=LONGEST_ATTEMPT)
        return _tcp_store(near, port, limit, serves=True, listener=listener.detach()), port


def _tcp_store(
    host: str, port: int, limit: timedelta, *, serves: bool = False, shared: bool = False, listener: int | None = None
) -> TCPStore:
    """torch's store, served without libuv where torch was built without that, as Debian's is.

    serves: whether this process serves it. shared: with other stores of this process on the port. listener: the
    descriptor of the socket to serve on; None if torch makes it.

    The class uses libuv by default; USE_LIBUV, which its error names, is read elsewhere in torch.
    """
    make = partial(TCPStore, host, port, None, serves, limit, False, shared, master_listen_fd=listener)
    try:
        return make()
    except RuntimeError as error:  # raised at first, so the descriptor was not taken yet
        if "without libuv" not in str(error):
            raise
        return make(use_libuv=False)


def is_taken(port: int) -> bool:
    """Whether something listens at that port of this host."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def _host_tcp(place: MeetingPlace, patience: Patience) -> Store:
    addresses, local = addresses_of(place, patience), is_local(place, patience)
    host = addresses[0] if addresses else place.host
    limit = timedelta(seconds=max(1.0, patience.attempt()))
    with _listener(place, addresses, local) or contextlib.nullcontext() as listener:
        if not local:
            _check_leads_here(place, patience)
        descriptor = listener.detach() if listener else None
    # A store that torch already serves in this process on that port (for a process group) is shared.
    make = partial(_tcp_store, host, place.port, limit, serves=True, shared=True, listener=descriptor)
    return bounded(make, patience.attempt())


def _listener(place: MeetingPlace, addresses: list[str], local: bool) -> socket.socket | None:
    """A socket for torch to serve the store on; None where its own will do, or where the port is taken."""
    with contextlib.suppress(OSError):
        if not local:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            return socket.create_server(("", place.port), family=family, backlog=512, dualstack_ipv6=dual)
        # torch listens on all interfaces, which a group on one host does not need.
        named = place.host == "localhost" or place.host == addresses[0]
        if len(addresses) == 1 and named and ipaddress.ip_address(addresses[0]).is_loopback:
            family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
            return socket.create_server((addresses[0], place.port), family=family, backlog=512)
    return None


def _check_leads_here(place: MeetingPlace, patience: Patience) -> None:
    """RuntimeError if nothing answers at the place, whose address is not this host's, although this host listens.

    Behind a translated address (a container's, a service's) that may still be right. torch's connecting to its own
    store cannot be ended, so a wrong address would leave a thread and an open port behind.
    """
    try:
        socket.create_connection((place.host, place.port), min(patience.attempt(), 5.0)).close()
    except socket.gaierror as error:
        raise RuntimeError(unresolved(place, error)) from error
    except OSError as error:
        raise RuntimeError(
            f"{place.host} is no address of this host and does not lead to it ({error}). Rank 0 runs here: give all "
            "workers an address of this host in MASTER_ADDR or init_method"
        ) from error


def reach_tcp(place: MeetingPlace, patience: Patience, grace: float) -> KeyValueClient:
    """A client of the store at the place, tried until it answers or the time is up (RendezvousError).

    RendezvousError at once if what answers is no torch store.
    """
    patience.trouble = patience.trouble or f"nothing has answered yet; {place.host!r} may be long to look up"
    visitor = Visitor(place, patience, grace)
    for _ in patience.tries():
        kv = visitor.visit()
        if kv is not None:
            return kv
    raise RendezvousError(f"cannot reach the store at {place} within {patience.seconds:g} s: {patience.trouble}")


def _reach(place: MeetingPlace, seconds: float) -> Reached:
    """A client of the store at the place, by one try. See `contact.Reach`."""
    limit = Patience(seconds)
    # torch's client logs each failed attempt, and waits without limit for a server that never speaks.
    with socket.create_connection((place.host, place.port), min(limit.attempt(), 5.0)) as probe:
        address = str(probe.getpeername()[0])
        other = stranger(probe, limit.attempt())
    if other:
        raise RendezvousError(f"cannot meet at {place}: {other}")

    def make() -> Reached:
        store = _tcp_store(address, place.port, timedelta(seconds=max(1.0, limit.attempt())))
        prefixed = PrefixStore("aiorpc", store)
        if not listens(place):  # the store is just ending, and torch logs failures
            raise ConnectionRefusedError(f"nothing listens at {place} any more")
        marks: list[bytes] = []
        fresh = secrets.token_hex(16)
        connection = connection_of(lambda: marks.append(prefixed.compare_set(_MARK, "", fresh)), place.port)
        watch = ServerWatch(connection or connection_beside(address, place.port))
        return Reached(prefixed, watch, marks[0].decode())

    return bounded(make, limit.attempt())


class Visitor:
    """Tries to reach the store at a place. grace: as of `Contact`, for the client."""

    def __init__(self, place: MeetingPlace, patience: Patience, grace: float) -> None:
        self._place, self._patience, self._grace = place, patience, grace
        self._asked = False  # whether `other_language` was tried

    def visit(self) -> KeyValueClient | None:
        """A client of the store; None if there is no answer now, with the reason in the patience.

        RendezvousError if what answers is no torch store.
        """
        place, patience, reach = self._place, self._patience, partial(_reach, self._place)
        try:
            client = reach(patience.attempt())
            contact = Contact(str(place), client, reach, self._grace, patience.stop)
            return KeyValueClient(None, str(place), contact=contact)
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
            patience.trouble = unresolved(place, error)
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
    except Exception as error:
        results.append(error)
    finally:
        del results  # the error has this frame: a store in a cycle would live until garbage collection


def listens(place: MeetingPlace) -> bool:
    """Whether something accepts connections at the place just now."""
    with contextlib.suppress(OSError), socket.create_connection((place.host, place.port), _LISTENING):
        return True
    return False
