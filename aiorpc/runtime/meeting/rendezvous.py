"""How workers find each other: a meeting place, a group, and a secret its members share.

All of it blocks and belongs in a helper thread, off every loop. Each wait polls the store and is bounded by the
timeout given to `Rendezvous.open`; a timeout of 0 means no limit, and `stop` ends any wait.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch.distributed import Store

from ...devices import DeviceClaims, check_device_maps
from ...errors import RendezvousError, StoreGone
from ...logs import logger
from ...protocol.identity import WorkerRecord
from ...undoing import on_error
from .agreeing import Agreement, check_alike
from .fixed import FixedWorld
from .free import FreeWorld, Listed
from .job_place import JobFolder, mark_job, open_job_port
from .key_value import KeyValueClient, from_hex
from .meeting_place import MeetingPlace, check_ranks, is_loopback, local_address, parse
from .membership import SET_IT, Member, Proof
from .patience import LAST_PAUSE, Patience
from .returning import JoiningInStore, PlacesInStore, Return, come_back
from .secret import CERTIFIED, SALT_SIZE, Secret, fingerprint, given_secret, make_key
from .stores import Hosting, bounded, listens, open_file, open_tcp, reach_tcp

T = TypeVar("T")

_TURN_AWAY = 0.03
_CLOSING_TIME = 1.5
_PROBE_TIME = 0.3  # seconds to wait for the announced end of a store before asking whether it was taken back
_RETURN_TIME = 5.0


@dataclass(frozen=True)
class MeetingOptions:
    """A worker's demands on its group, and how long it waits.

    require_secret: whether joining needs AIORPC_SECRET; None: only if members or store are on another host.
    secret: that of the group, in place of any that the user gives. secret_file: has it, in place of AIORPC_SECRET.
    certificates: they prove membership if there is no secret.
    safe: whether this worker reads no pickles. founding: seconds for which the first worker of a free group at
    ``tcp://`` waits for members of an earlier store. grace: seconds for which an unreachable store is tried again after
    its connection broke.
    """

    require_secret: bool | None = None
    secret_file: str | os.PathLike[str] | None = None
    secret: Secret | None = None
    certificates: bool = False
    safe: bool = False
    founding: float = 0.0
    grace: float = 0.0


class Rendezvous:
    """One worker's view of the meeting place. Made by `open`; its methods may be called from any thread.

    rank, world_size: as given or found in the environment; world_size is None for a free group. hosts_store: this
    process serves the store, and the group cannot be joined after its end. claims: the members' claims about their
    devices at `join`, by name. returned: how this worker took the place of a lost member; None if it did not.
    """

    def __init__(
        self,
        place: MeetingPlace,
        kv: KeyValueClient,
        hosts_store: bool,
        patience: Patience,
        own_secret: Secret | None,
        options: MeetingOptions,
    ) -> None:
        self.rank: int | None = place.rank
        self.world_size: int | None = place.world_size
        self.hosts_store: bool = hosts_store
        self._ends_store = False
        self._folder: JobFolder | None = None  # where this worker meets the others of a launcher's job on this host
        self._place = place
        self._patience = patience
        self._founding = options.founding
        self._grace = options.grace
        self._kv = kv
        self._own_secret = own_secret
        certificates = options.certificates and own_secret is None
        self._proof = Proof(None, options.require_secret, certificates, options.safe)
        self._salted = ""  # the salt in the store, once it was read
        self._key: tuple[str, Secret] | None = None  # the salt, and the key made with it of our own secret
        self._world = self._make_world()
        self.claims: dict[str, DeviceClaims] = {}
        self._agreement: Agreement | None = None  # if the members made a secret themselves
        self.returned: Return | None = None
        self._made: WorkerRecord | None = None
        self._written: dict[str, str] = {}  # by `swap`; written again if the store is replaced

    @classmethod
    def open(
        cls,
        init_method: str,
        *,
        rank: int | None,
        world_size: int | None,
        timeout: float | Patience,
        stop: threading.Event | None = None,
        store: Store | None = None,
        options: MeetingOptions = MeetingOptions(),  # it is frozen
    ) -> Rendezvous:
        """Reach (or host) the store that `init_method` names, or use the `store` given.

        timeout: seconds for this, `join` and `agree_secret` together, 0 means no limit; or a `Patience`, with a `stop`
        of its own. RendezvousError: a variable of env:// is missing, AIORPC_SECRET is none, or the store cannot be
        reached in time. RpcUsageError: the arguments make no sense.
        """
        patience = timeout if isinstance(timeout, Patience) else Patience(timeout, stop)
        own_secret = options.secret or given_secret(options.secret_file)
        make = partial(cls, patience=patience, own_secret=own_secret, options=options)
        if store is not None:
            check_ranks(rank, world_size)
            place = MeetingPlace(rank, world_size)
        else:
            place = parse(init_method, rank, world_size, os.environ)
        patience.place = str(place)
        if place.launched is not None:
            logger.info("started by %s; the group meets at %s", place.launched, place)
        if (
            options.require_secret and own_secret is None and place.world_size is None
        ):  # with a world size, `join` also tells the waiting members
            raise RendezvousError(f"AIORPC_SECRET is not set, and this worker has require_secret=True: {SET_IT}")
        if store is not None:
            return make(place, KeyValueClient(store, str(place)), False)
        if place.path:
            folder = JobFolder(Path(place.path).parent) if place.job else None
            with on_error(folder.leave) if folder is not None else contextlib.nullcontext():
                rendezvous = make(place, open_file(place), False)
            rendezvous._folder = folder
            return rendezvous
        if place.job:
            place, hosting = open_job_port(place, patience, options.grace)
        else:
            hosting = open_tcp(place, patience, options.grace)
        rendezvous = make(place, hosting.kv, hosting.hosted)
        rendezvous._reached(hosting)
        return rendezvous

    @property
    def dynamic(self) -> bool:
        """Whether the group is free: workers join and leave at any time."""
        return self.world_size is None

    @property
    def confined(self) -> bool:
        """Whether all members have to be on this host, because they meet at a loopback address and have no other proof.

        With AIORPC_SECRET or certificates the address may be the near end of a tunnel.
        """
        return self._own_secret is None and not self._proof.certificates and is_loopback(self._place)

    @property
    def generation(self) -> int:
        """How many times, counting this one, the group was formed at this store; 0 before `join`."""
        return self._world.generation

    def local_address(self) -> str:
        """IP address of the interface that reaches the rendezvous; a loopback address if the place is on this host
        alone."""
        return local_address(self._place)

    def join(
        self, make_record: Callable[[int], WorkerRecord], claims: DeviceClaims | None = None
    ) -> list[WorkerRecord]:
        """Register this worker. Returns the members' records: by rank, or in a free group those of now, oldest first.

        make_record is called with the worker's id (the rank, or a free number in a free group) and returns its record.
        claims: about this worker's devices. RendezvousError, on all ranks concerned: a name or rank is not unique,
        world sizes differ, ranks are missing. DeviceMapError: claims that do not fit together.
        """
        mine = claims or DeviceClaims()

        def make(number: int) -> WorkerRecord:
            self._made = make_record(number)
            return self._made

        for _ in self._patience.tries():
            try:
                self._kv.check_open()
                self._await_elders()
                self._make_key()
                if isinstance(self._world, FreeWorld):
                    members = self._world.join(make, mine, self._patience, self._made)
                else:
                    record = self._made or make(self._world.rank)
                    members = self._come_back(self._world, record, mine)
                    members = members or self._world.join(record, mine, self._patience)
                self.claims = {member.record.name: member.claims for member in members}
                return [member.record for member in members]
            except StoreGone:
                if not self.is_client or self._patience.left() <= 0:
                    raise
                self._reconnect()
        raise RendezvousError(f"the store at {self._place} kept closing for {self._patience.seconds:g} s")

    def _come_back(self, world: FixedWorld, record: WorkerRecord, claims: DeviceClaims) -> list[Member]:
        """Take the place of a lost member, if a group that has lost it runs here: the members; else an empty list."""
        places = self._places(self._kv.number("generation"))
        returned = come_back(places, record, claims, self._patience)
        if returned is None:
            return []
        members = [*returned.admission.members, returned.member]
        try:
            check_device_maps({member.record.name: member.claims for member in members})
        except RendezvousError:
            returned.give_up()
            raise
        world.enter(returned.generation, members)
        self.returned, self._made = returned, returned.record
        return members

    def _places(self, generation: int) -> PlacesInStore:
        assert self.world_size is not None, "a free group has no places"
        return PlacesInStore(self._kv, generation, self.world_size, self._whole_proof())

    @property
    def record(self) -> WorkerRecord:
        """This worker's record, as registered at `join`."""
        assert self._made is not None, "it has joined"
        return self._made

    @property
    def joining(self) -> JoiningInStore:
        """The workers that want the places of lost members of this group of fixed size."""
        serve = self._serve_far if self._agreement is not None else None
        return JoiningInStore(self._places(self.generation), self.record, serve, self._check_there)

    def _serve_far(self, joining: WorkerRecord) -> None:
        assert self._agreement is not None, "else it has its own"
        member = self._proof.member(joining, DeviceClaims(), self.generation)
        self._agreement.serve(self._kv, f"{self.generation}/secret", [member])

    def _check_there(self) -> None:
        if self.is_client and not listens(self._place):  # torch logs every failed operation
            raise StoreGone(f"the store at {self._place} has gone")

    def members(self) -> list[WorkerRecord]:
        """Records of the members: those of now in a free group, those found at `join` in a fixed one. RendezvousError
        if they were written without AIORPC_SECRET.
        """
        members = self._world.members()
        if self._own_secret is not None:
            members = [member for member in members if member.own_secret]  # others are told so as they join
        return [member.record for member in members]

    def swap(self, key: str, expected: str, desired: str, *, lasting: bool = True) -> str:
        """Set a key of this group in the store to `desired` if it is `expected` ("" for missing); what it holds then.

        The value also goes into the next store if this one is replaced (`meet_again`). If not `lasting`, neither it nor
        an earlier value of the key does. RendezvousError if the store does not answer.
        """
        held = self._kv.swap(f"{self.generation}/{key}", expected, desired)
        if not lasting:
            self._written.pop(key, None)
        elif held == desired:
            self._written[key] = desired
        return held

    def look_up(self, key: str) -> str | None:
        """The value of a key of this group, None if there is none. RendezvousError as of `swap`."""
        return self._kv.get(f"{self.generation}/{key}")

    def load(self, key: str, text: str, shape: Callable[[object], T]) -> T:
        """What `shape` makes of the JSON under such a key; RendezvousError for what no worker has written there."""
        return self._kv.load(f"{self.generation}/{key}", text, shape)

    def find(self, name: str, patience: float) -> WorkerRecord | None:
        """The member of that name, or None. RendezvousError if the store does not answer for so many seconds.

        It may be called on a loop, which it then blocks.
        """
        try:
            members = bounded(self.members, patience)
        except TimeoutError:
            raise RendezvousError(
                f"cannot find worker {name!r}: the store at {self._place} has not answered for {patience:g} s"
            ) from None
        return next((record for record in members if record.name == name), None)

    def leave(self, record: WorkerRecord) -> None:
        """Take a record (this worker's or a lost peer's) out of the group, if the store can be reached."""
        if isinstance(self._world, FreeWorld):
            self._world.struck.add(record.incarnation)
        self._tell(self._world.leave, record)

    def has_left(self, record: WorkerRecord) -> bool:
        """Whether a member has written that it leaves. RendezvousError if the store does not answer."""
        self._check_there()
        return self._world.has_left(record)

    def say_farewell(self, record: WorkerRecord) -> None:
        """Write that this worker leaves in good order, if the store can be reached; `leave` follows at the end."""
        self._tell(self._world.say_farewell, record)

    def abandon(self) -> None:
        """`join` was given up: give back the rank and the name.

        If this worker was just admitted to a lost member's place, take its claim back. Otherwise the place would be
        taken for as long as the process lives.
        """
        if self._made is not None:
            self._tell(self._world.abandon if self.returned is None else self._world.leave, self._made)

    def _tell(self, step: Callable[[WorkerRecord], None], record: WorkerRecord) -> None:
        # torch logs every failed operation: do not ask a missing server.
        if self.is_client and not listens(self._place):
            return
        with contextlib.suppress(StoreGone):
            step(record)

    def close(self) -> None:
        """Let go of the store, and end the server if this process hosts it. Idempotent.

        The host first waits up to 2 s for ranks that have not yet read that the group is complete, and its secret.
        """
        try:
            with contextlib.suppress(StoreGone):
                if self.hosts_store:
                    self._await_ranks()
                if self._ends_store and self._made is not None:
                    self._announce_end(self._made)
        finally:  # also if a stranger has written garbage into the store
            self._kv.close()
            if self._ends_store and self._made is not None and listens(self._place):
                self._take_back_end(self._made)
            if self._folder is not None:
                self._folder.leave()
                self._folder = None

    def _await_ranks(self) -> None:
        if isinstance(self._world, FixedWorld) and self._world.members():
            read = "done" if self._agreement is None else "secret/read"
            self._world.wait_until_known(self._world.world_size, 2.0, read)

    def _take_back_end(self, maker: WorkerRecord) -> None:
        """The store lives on because a process group of torch uses it, too: take back the announced end."""
        with contextlib.suppress(RendezvousError):
            kv = reach_tcp(self._place, Patience(_RETURN_TIME), 0.0)
            try:
                kv.take_back_end(maker)
            finally:
                kv.close()

    def _announce_end(self, maker: WorkerRecord) -> None:
        self._kv.announce_end(maker)
        # Ranks of the next group may be here already: give them time to leave, lest torch logs broken connections.
        time.sleep(_TURN_AWAY)
        if self._kv.number("generation") > self.generation:
            time.sleep(3 * LAST_PAUSE)

    def agree_secret(self, record: WorkerRecord, directory: str | Path) -> bytes:
        """The 32 bytes with which the group's members prove their membership.

        If AIORPC_SECRET is set (on all, or RendezvousError), they are made of it. If certificates prove membership,
        they are a constant and no secret. Otherwise they are derived from the key of this user in `directory`, which is
        private to this user. With members on other hosts the latter is a RendezvousError, unless `require_secret` is
        False: then the secret goes through the store, and everyone with access to the store may join. RendezvousError,
        too, if members have different keys or differ in what they must agree on (`check_alike`).
        """
        members = self._world.members()
        alive = self._world.alive(members) if isinstance(self._world, FreeWorld) else members
        check_alike(alive)
        if self._key is not None:
            return self._key[1]
        if self._proof.certificates:
            return CERTIFIED
        agreement = Agreement(record, self._place, self._proof, Path(directory), confined=self.confined)
        agreement.check_allowed(alive)
        key = f"{self.generation}/secret"
        forms = not self.dynamic and self.returned is None
        value = agreement.reach(self._kv, key, from_hex(self._salt()), alive, self._patience, forms=forms)
        if forms:
            self._kv.count(f"{key}/read", at_most=True)
        self._agreement = agreement
        self._written["secret"] = fingerprint(value)
        return value

    @property
    def is_client(self) -> bool:
        """Whether another process serves the store over TCP; it may be unreachable for a while."""
        return bool(self._place.host) and not self.hosts_store

    @property
    def may_return(self) -> bool:
        """Whether `meet_again` may find a new store in place of a lost one."""
        return self.dynamic and self.is_client

    def meet_again(self, record: WorkerRecord) -> bool:
        """After StoreGone, in a free group: move to the store that is at the place now; False if there is none.

        If it is the same store, which was unreachable for a while, its content stays.

        It waits a few seconds at most. RendezvousError if others have begun a group of their own there.
        """
        before = self._world
        if not listens(self._place) or not isinstance(before, FreeWorld):
            return False
        with contextlib.suppress(StoreGone):
            if before.founded():
                return True
        patience = Patience(_RETURN_TIME, self._patience.stop)
        kv = reach_tcp(self._place, patience, self._grace)
        with on_error(kv.close):
            ours = not self._salted or kv.swap("salt", "", self._salted) == self._salted
            world = FreeWorld(kv, self.rank, proof=before.proof)
            if not ours or not world.resume(before, record, patience, self._written):
                raise RendezvousError(
                    f"others have begun a group of their own at {self._place}, while {record.describe()} was not heard "
                    "of there: workers that join it find neither this worker nor those that it knows. Start it again "
                    "to bring it into the new group, or end the new one"
                )
        self._kv.close()
        self._kv, self._world = kv, world
        return True

    def serve_joining(self, absence: float = 0.0, *, parted: bool = False) -> Listed | None:
        """Look at the list of members, and let joining members find the secret. It does not wait.

        A member of a free group calls this regularly. It returns the list, or None if nothing has changed there since
        the last look. If others have kept this worker off the list for `absence` seconds, it enters the list again, see
        `FreeWorld.stay`. StoreGone if the store has gone. OSError if the key of this user has gone and cannot be
        written again.
        """
        world = self._world
        if not isinstance(world, FreeWorld):
            return None
        listed = world.look()  # also if there is nothing to hand out: see `meet_again`
        world.stay(self.record, absence, parted=parted)
        if self._agreement is not None:
            self._agreement.serve(self._kv, f"{self.generation}/secret", world.newest.members if listed else ())
        return listed

    def _whole_proof(self) -> Proof:
        return replace(self._proof, key=self._key[1] if self._key is not None else None)

    def _make_world(self) -> FixedWorld | FreeWorld:
        proof = self._whole_proof()
        if self.world_size is None:
            return FreeWorld(self._kv, self.rank, proof=proof)
        assert self.rank is not None, "checked with the arguments"
        return FixedWorld(self._kv, self.rank, self.world_size, proof=proof, hosts_store=self.hosts_store)

    def _salt(self) -> str:
        """The salt of this group: the first worker leaves it in the store."""
        salt = self._kv.swap("salt", "", secrets.token_hex(SALT_SIZE))
        if len(from_hex(salt)) != SALT_SIZE:
            raise self._kv.rubbish("salt", "no salt")
        self._salted = salt
        return salt

    def _make_key(self) -> None:
        """Make the key of our own secret, if there is one, with the store's salt, and the world anew with it."""
        if self._own_secret is None:
            return
        salt = self._salt()
        if self._key is None or self._key[0] != salt:
            self._key = salt, make_key(self._own_secret, from_hex(salt))
            self._world = self._make_world()

    def _await_elders(self) -> None:
        """Wait for members of a group that has lost its store: they come to the new store at the place."""
        if isinstance(self._world, FreeWorld) and self._place.host and self._founding:
            patience = Patience(min(self._founding, self._patience.attempt()), self._patience.stop)
            for _ in patience.tries():
                if self._world.founded():
                    return
            logger.info("no member was at %s or came back within %g s: a new group", self._place, patience.seconds)

    def _reconnect(self) -> None:
        """Wait for the end of a store that is being closed, or for its host to take that back, and reach a store
        again."""
        self._kv.close()
        limit = time.monotonic() + min(_CLOSING_TIME, self._patience.attempt())
        # The store's end closes this connection; the port alone does not tell this store from the next.
        with contextlib.suppress(OSError), socket.create_connection((self._place.host, self._place.port), 1.0) as probe:
            probe.settimeout(_PROBE_TIME)
            while time.monotonic() < limit and not self._patience.stop.is_set():
                with contextlib.suppress(TimeoutError):
                    if not probe.recv(1):
                        break
                hosting = open_tcp(self._place, self._patience, self._grace)
                with contextlib.suppress(StoreGone):
                    if not hosting.kv.closing():
                        self._use(hosting)
                        return
                hosting.kv.close()
        # The next group's host may have come to the earlier group's ending store; it hosts a store here.
        self._use(open_tcp(self._place, self._patience, self._grace))

    def _use(self, hosting: Hosting) -> None:
        self._kv, self.hosts_store = hosting.kv, hosting.hosted
        self._reached(hosting)
        self._world = self._make_world()

    def _reached(self, hosting: Hosting) -> None:
        """There is a store."""
        self._patience.trouble = ""
        self._ends_store = hosting.ends
        if self.hosts_store:  # a store shared with torch may hold an earlier worker's announcement
            self._kv.reopen()
            mark_job(self._kv, self._place)
