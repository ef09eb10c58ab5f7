"""How workers find each other: a meeting place, a group, and a secret its members share.

All of it blocks and belongs in a helper thread, off every loop. Each wait polls the store and is bounded by the
timeout given to `Rendezvous.open`; a timeout of 0 means no limit, and `stop` ends any wait.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # not in torch's stubs

from ...devices import DeviceClaims, check_device_maps
from ...errors import RendezvousError, StoreGone
from ...protocol.identity import WorkerRecord
from ...protocol.leaving import Roster
from ..engine.host import host_identity, main_identity
from .held import ADVICE, SECRET_BYTES, HeldSecret, from_hex
from .membership import SET_IT, FixedWorld, FreeWorld, Member, Proof
from .returning import Admission, Answer, PlacesInStore, Return, come_back
from .secret import CERTIFIED, SALT_SIZE, Secret, given_secret, make_key
from .stores import (
    LAST_PAUSE,
    Board,
    MeetingPlace,
    Patience,
    bounded,
    check_ranks,
    is_local,
    is_loopback,
    listens,
    local_address,
    open_file,
    open_tcp,
    parse,
    reach_tcp,
)

__all__ = ["Rendezvous", "host_identity", "main_identity"]

logger = logging.getLogger("aiorpc")

_TURN_AWAY = 0.03
_CLOSING_TIME = 1.5
_PROBE_PAUSE = 0.05
_READING_TIME = 2.0
_RETURN_TIME = 5.0


class Rendezvous:
    """One worker's view of the meeting place. Made by `open`; its methods may be called from any thread.

    rank, world_size: as given or found in the environment; world_size is None for a group that is joined freely.
    hosts_store: this process serves the store, so the group cannot be joined once it has gone.
    claims: what the members said of their devices, by name, as found at `join`. returned: how this worker has come to
    the place of a member that was lost; None if it has not.
    """

    def __init__(
        self,
        place: MeetingPlace,
        board: Board,
        hosts_store: bool,
        patience: Patience,
        own_secret: Secret | None,
        proof: Proof,
        founding: float,
    ) -> None:
        self.rank = place.rank
        self.world_size = place.world_size
        self.hosts_store = hosts_store
        self._place = place
        self._patience = patience
        self._founding = founding
        self._board = board
        self._own_secret = own_secret
        self._proof = proof
        self._key: tuple[str, Secret] | None = None  # made of our own secret, and the salt that it was made with
        self._world = self._make_world()
        self.claims: dict[str, DeviceClaims] = {}
        self._held: HeldSecret | None = None
        self.returned: Return | None = None
        self._made: WorkerRecord | None = None

    @classmethod
    def open(
        cls,
        init_method: str,
        *,
        rank: int | None,
        world_size: int | None,
        timeout: float,
        stop: threading.Event | None = None,
        store: Store | None = None,
        require_secret: bool | None = None,
        secret_file: str | os.PathLike[str] | None = None,
        certificates: bool = False,
        founding: float = 0.0,
    ) -> Rendezvous:
        """Reach (or host) the store that `init_method` names, or use the `store` given.

        timeout: seconds for this, `join` and `agree_secret` together; 0 means no limit. require_secret: whether nobody
        joins without AIORPC_SECRET; None: only where members or store are on another host. secret_file: where the
        secret stands, in place of AIORPC_SECRET. certificates: without a secret they say who is a member.
        founding: seconds that whoever finds nobody in a free group at ``tcp://`` waits for members of an earlier store.
        RendezvousError: a variable of env:// is missing, AIORPC_SECRET is none, or the store cannot be reached in time.
        RpcUsageError: the arguments make no sense.
        """
        patience = Patience(timeout, stop)
        own_secret = given_secret(secret_file)
        proof = Proof(None, require_secret, certificates and own_secret is None)
        make = partial(cls, patience=patience, own_secret=own_secret, proof=proof, founding=founding)
        if store is not None:
            check_ranks(rank, world_size)
            place = MeetingPlace(rank, world_size)
        else:
            place = parse(init_method, rank, world_size, os.environ)
        if require_secret and own_secret is None and place.world_size is None:  # else those who wait are told as well
            raise RendezvousError(f"AIORPC_SECRET is not set, and this worker has require_secret=True: {SET_IT}")
        if store is not None:
            return make(place, Board(store, str(place)), False)
        if place.path:
            return make(place, open_file(place), False)
        made, hosts_store = open_tcp(place, patience)
        rendezvous = make(place, made, hosts_store)
        if hosts_store:
            # A store shared with a process group of torch outlives us and may still say that we were leaving.
            rendezvous._board.set_closing(False)
        return rendezvous

    @property
    def dynamic(self) -> bool:
        """Whether the group is free: workers join and leave at any time."""
        return self.world_size is None

    @property
    def confined(self) -> bool:
        """Whether all members have to be on this host: they meet at a loopback address, and know each other by it.

        With AIORPC_SECRET or certificates the address may be the near end of a tunnel.
        """
        return self._own_secret is None and not self._proof.certificates and is_loopback(self._place)

    @property
    def generation(self) -> int:
        """How many times, counting this one, the group was formed at this store; 0 before `join`."""
        return self._world.generation

    def local_address(self) -> str:
        """IP address of the interface that reaches the rendezvous; 127.0.0.1 if that is on this host alone."""
        return local_address(self._place)

    def join(
        self, make_record: Callable[[int], WorkerRecord], claims: DeviceClaims | None = None
    ) -> list[WorkerRecord]:
        """Register this worker. Returns the records of the members: all of them by rank, or those that are there now.

        make_record is called with the worker's id (the rank, or a free number in a free group) and returns its record.
        claims: what this worker says about its devices. RendezvousError, on all ranks where all are concerned: a name
        or rank that is not unique, different world sizes, missing ranks. DeviceMapError: claims that do not fit
        together.
        """
        mine = claims or DeviceClaims()

        def make(number: int) -> WorkerRecord:
            self._made = make_record(number)
            return self._made

        for _ in self._patience.tries():
            try:
                self._check_open()
                self._await_elders()
                self._make_key()
                if isinstance(self._world, FreeWorld):
                    members = self._world.join(make, mine, self._patience)
                else:
                    record = self._made or make(self._world.rank)
                    members = self._come_back(self._world, record, mine)
                    members = members or self._world.join(record, mine, self._patience)
                self.claims = {member.record.name: member.claims for member in members}
                return [member.record for member in members]
            except StoreGone:
                if not self._is_client() or self._patience.left() <= 0:
                    raise
                self._reconnect()
        raise RendezvousError(f"the store at {self._place} kept closing for {self._patience.seconds:g} s")

    def _come_back(self, world: FixedWorld, record: WorkerRecord, claims: DeviceClaims) -> list[Member]:
        """Take the place of a lost member, if a group that has lost it runs here: the members, or nobody."""
        places = self._places(self._board.number("generation"))
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
        return PlacesInStore(self._board, generation, self.world_size, self._whole_proof())

    @property
    def record(self) -> WorkerRecord:
        """What this worker has said of itself, as `join` was called."""
        assert self._made is not None, "it has joined"
        return self._made

    def applicants(self, ranks: Sequence[int]) -> list[WorkerRecord]:
        """The newcomers that claim the places of these ranks. StoreGone if the store is not there any more."""
        self._check_there()
        return self._places(self.generation).applicants(ranks)

    def left(self, records: Sequence[WorkerRecord]) -> list[WorkerRecord]:
        """Those of the members of a fixed group that have left. StoreGone if the store is not there any more."""
        self._check_there()
        places = self._places(self.generation)
        return [record for record in records if places.has_left(record)]

    def _check_there(self) -> None:
        if self._is_client() and not listens(self._place):  # torch logs every failed operation
            raise StoreGone(f"the store at {self._place} has gone")

    def admit(self, newcomer: WorkerRecord, roster: Roster) -> None:
        """Let a newcomer know that it may come, who is in the group, and where it finds the secret."""
        assert self._made is not None, "who leads has joined"
        far = newcomer.host != self._made.host
        offer: dict[str, str] = {}
        if self._held is not None:
            if far and self._proof.require_secret is not False:
                self.turn_away(
                    newcomer, f"it is on another host than the leader, and AIORPC_SECRET is not set: {SET_IT}"
                )
                return
            offer = self._held.offer(far)
        members = tuple(member.id for member in roster.members)
        lost = tuple((member.id, cause) for member, cause in roster.lost)
        answer = Answer(self._made.incarnation, members=members, lost=lost, secret=offer)
        self._places(self.generation).reply(newcomer, answer)

    def turn_away(self, newcomer: WorkerRecord, reason: str) -> None:
        """Let a newcomer know that it cannot come, and why."""
        assert self._made is not None, "who leads has joined"
        self._places(self.generation).reply(newcomer, Answer(self._made.incarnation, refused=reason))

    def members(self) -> list[WorkerRecord]:
        """Records of the group: who is in it now if it is dynamic, else those found at `join`.

        RendezvousError if somebody who does not know AIORPC_SECRET has written them.
        """
        members = self._world.members()
        if self._own_secret is not None:
            members = [member for member in members if member.own_secret]  # whoever joins without it is told so
        return [member.record for member in members]

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
        """Take a record out of the group (one's own, or a lost peer's); as far as the store is there, now or later."""
        if isinstance(self._world, FreeWorld):
            self._world.struck.add(record.incarnation)
        self._tell(self._world.leave, record)

    def abandon(self) -> None:
        """`join` was given up: give back the rank and the name, so that nobody takes this worker for a member."""
        if self._made is not None:
            self._tell(self._world.abandon, self._made)

    def _tell(self, step: Callable[[WorkerRecord], None], record: WorkerRecord) -> None:
        # torch logs every failed operation: do not ask a server that is not there.
        if self._is_client() and not listens(self._place):
            return
        with contextlib.suppress(StoreGone):
            step(record)

    def close(self) -> None:
        """Let go of the store, and end the server if this process hosts it. Idempotent.

        The host first waits up to 2 s for ranks that have not yet read that the group is complete; whoever made the
        group's secret as long for those that have not read it.
        """
        try:
            with contextlib.suppress(StoreGone):
                self._await_readers()
                if self.hosts_store:
                    self._announce_end()
        finally:  # also where a stranger has written into the store what nobody can read
            self._board.close()
            self.remove_secret()

    def remove_secret(self) -> None:
        """Remove the file with the group's secret, if this worker made it. Does not wait; OSError if that fails."""
        if self._held is not None:
            self._held.remove()

    def _await_readers(self) -> None:
        """Wait until the others have read the file with the secret: a rank may leave before others have begun."""
        if isinstance(self._world, FixedWorld) and self._held is not None and self._held.path is not None:
            others = self._world.world_size - 1
            for _ in Patience(_READING_TIME).tries():
                if self._board.number(self._secret_key("secret/read")) >= others:
                    return

    def _announce_end(self) -> None:
        if isinstance(self._world, FixedWorld) and self._world.members():
            self._world.wait_until_known(self._world.world_size, 2.0)
        self._board.set_closing(True)
        # Ranks may already be here for the next group: time to turn away, lest torch logs their broken connections.
        time.sleep(_TURN_AWAY)
        if self._board.number("generation") > self.generation:
            time.sleep(3 * LAST_PAUSE)

    def agree_secret(self, record: WorkerRecord, records: Sequence[WorkerRecord], directory: str | Path) -> bytes:
        """The 32 bytes by which the group's members know each other.

        Made of AIORPC_SECRET if it is set (on all, or RendezvousError). Else, where certificates say who is a member,
        they are the same everywhere, and no secret. Else the first member makes them and leaves them in a 0600 file in
        a directory like `directory`, private to this user. If there are members on other hosts that is a
        RendezvousError, unless `require_secret` is False: then they get the secret through the store, and whoever
        reaches that may join. RendezvousError, too, where somebody else was at what the store says of it.
        """
        self._check_agreement()
        if self._key is not None:
            return self._key[1]
        if self._proof.certificates:
            return CERTIFIED
        self._check_confined(record, records)
        self._check_required(record, records)
        held = HeldSecret(record, Path(directory))
        try:
            if self.returned is not None:
                value = self._agree_as_newcomer(held, self.returned.admission)
            elif isinstance(self._world, FreeWorld):
                value = self._agree_free(held)
            else:
                value = self._agree_fixed(held, records)
            self._check_offer(held)
        except BaseException:
            held.remove()
            raise
        self._held = held
        return value

    @property
    def may_return(self) -> bool:
        """Whether `meet_again` may find another store where the one that has gone was."""
        return self.dynamic and self._is_client()

    def meet_again(self, record: WorkerRecord) -> bool:
        """After StoreGone, in a free group: meet newcomers at the store that is there now; False if there is none.

        It waits a few seconds at most. RendezvousError if that cannot be, as others have begun a group of their own
        there, for example.
        """
        before = self._world
        if not listens(self._place) or not isinstance(before, FreeWorld):
            return False
        patience = Patience(_RETURN_TIME, self._patience.stop)
        board = reach_tcp(self._place, patience)
        try:
            key = self._key
            ours = key is None or board.swap("salt", "", key[0]) == key[0]
            world = FreeWorld(board, self.rank, proof=before.proof)
            if not ours or not world.resume(before, record, patience):
                raise RendezvousError(
                    f"others have begun a group of their own at {self._place}, while {record.describe()} was not heard "
                    "of there: whoever joins that finds neither this worker nor those that it knows. Start it again to "
                    "bring it into the new group, or end the new one"
                )
        except BaseException:
            board.close()
            raise
        self._board.close()
        self._board, self._world = board, world
        return True

    def serve_secret_requests(self) -> None:
        """See who is there, and hand the secret to newcomers who cannot read the file.

        A member of a free group calls this now and then. It does not wait. Only one member acts: the one that offers
        the secret or, after that has left, the oldest one that has it. StoreGone if the store has gone.
        """
        world, held = self._world, self._held
        if isinstance(world, FreeWorld):
            members = world.members()  # also where there is nothing to hand out: see `meet_again`
            if held is not None:
                self._serve_secret(world, held, world.alive(members))

    def _serve_secret(self, world: FreeWorld, held: HeldSecret, alive: Sequence[Member]) -> None:
        raw, offer = self._offer()
        asker = self._asker(alive)
        far = asker is not None and asker.host != held.record.host and not self.confined
        far = far and self._proof.require_secret is False
        if self._owner(offer, alive) is None:
            heirs = [member.record.incarnation for member in alive if member.trusted]
            if heirs[:1] == [held.record.incarnation]:
                self._publish(held, raw, far)
        elif offer["owner"] == held.record.incarnation:
            if far and "value" not in offer:
                self._publish(held, raw, True)
            elif asker is not None:
                held.write()  # somebody may have tidied up

    def _whole_proof(self) -> Proof:
        return replace(self._proof, key=self._key[1] if self._key is not None else None)

    def _make_world(self) -> FixedWorld | FreeWorld:
        proof = self._whole_proof()
        if self.world_size is None:
            return FreeWorld(self._board, self.rank, proof=proof)
        assert self.rank is not None, "checked with the arguments"
        return FixedWorld(self._board, self.rank, self.world_size, proof=proof, hosts_store=self.hosts_store)

    def _make_key(self) -> None:
        """Make the key of our own secret, if we have one, with the salt of the store, and the world anew with it."""
        if self._own_secret is None:
            return
        salt = self._board.swap("salt", "", secrets.token_hex(SALT_SIZE))
        if self._key is not None and self._key[0] == salt:
            return
        if len(from_hex(salt)) != SALT_SIZE:
            raise self._board.rubbish("salt", "no salt")
        self._key = salt, make_key(self._own_secret, from_hex(salt))
        self._world = self._make_world()

    def _is_client(self) -> bool:
        return bool(self._place.host) and not self.hosts_store

    def _check_open(self) -> None:
        """StoreGone if the previous group's host is about to end the store; one that has ended is waited for anew."""
        if self._is_client() and not listens(self._place):
            self._connect_again()
        self._board.check_open()

    def _await_elders(self) -> None:
        """Wait for members of a group that has lost its store: they come back to whatever store is at the place."""
        if isinstance(self._world, FreeWorld) and self._place.host and self._founding:
            patience = Patience(min(self._founding, self._patience.attempt()), self._patience.stop)
            for _ in patience.tries():
                if self._world.founded():
                    return
            logger.info("nobody is at %s, nor came back within %g s: a new group", self._place, patience.seconds)

    def _reconnect(self) -> None:
        self._board.close()
        self._wait_for_end()
        self._connect_again()

    def _connect_again(self) -> None:
        self._board.close()
        self._board = reach_tcp(self._place, self._patience)
        self._world = self._make_world()

    def _wait_for_end(self) -> None:
        """A store that is closing is gone soon, unless torch uses it as well: then its host takes it up again."""
        limit = time.monotonic() + min(_CLOSING_TIME, self._patience.attempt())
        # Its end closes this connection; a look at the port alone would take the next store for this one.
        with contextlib.suppress(OSError), socket.create_connection((self._place.host, self._place.port), 1.0) as probe:
            probe.settimeout(_PROBE_PAUSE)
            while time.monotonic() < limit and not self._patience.stop.is_set():
                with contextlib.suppress(TimeoutError):
                    if not probe.recv(1):
                        return

    def _check_agreement(self) -> None:
        """Members that know each other by different things would find that out at their first call."""
        members = self._world.members()
        with_it, without = _parted(members, [member.own_secret for member in members])
        if with_it and without:
            raise RendezvousError(
                f"AIORPC_SECRET must be set for all workers or for none: {with_it} have it, {without} have not"
            )
        with_them, without = _parted(members, [member.certificates for member in members])
        if with_them and without:
            raise RendezvousError(
                f"{with_them} know members by their certificates alone, {without} do not: give all workers tls= with "
                f"the same verify_names and require_secret, or {SET_IT}"
            )

    def _check_confined(self, record: WorkerRecord, records: Sequence[WorkerRecord]) -> None:
        far = [other.describe() for other in records if other.host != record.host]
        if self.confined and far:
            raise RendezvousError(
                f"the store at {self._place} says that {', '.join(far)} would be on another host or in another "
                f"container, but that place is on this host alone. Somebody else has written into the store, {ADVICE}"
            )

    def _check_required(self, record: WorkerRecord, records: Sequence[WorkerRecord]) -> None:
        far = [other.describe() for other in records if other.host != record.host]
        place = self._place
        if not (far or (place.host and not is_loopback(place) and not is_local(place))):
            return
        members = self._world.members()
        careless, others = _parted(members, [member.require_secret is False for member in members])
        if self._proof.require_secret is False and not others:
            return
        if careless and others:
            raise RendezvousError(
                f"require_secret has to be the same on all workers where they or their store are on several hosts: "
                f"{careless} have require_secret=False, {others} have not. {_upper(SET_IT)}"
            )
        where = f"{', '.join(far)} would be" if far else f"the store at {place} is"
        raise RendezvousError(
            f"AIORPC_SECRET is not set, and {where} on another host than {record.describe()}, or in another container. "
            f"{_upper(SET_IT)}. Or give tls= to all, with certificates that bear their names. Or give "
            "require_secret=False to all: then their secret goes through the store, and whoever reaches "
            f"{place} is trusted to run code on all of them"
        )

    def _check_offer(self, held: HeldSecret) -> None:
        """Our own offer of the secret, if we have made one, has to stand in the store as we wrote it."""
        if held.published and self._offer()[0] != held.published:
            raise self._forged(held.record)

    def _forged(self, owner: WorkerRecord) -> RendezvousError:
        return RendezvousError(
            f"the store at {self._place} does not say of the group's secret what {owner.describe()} wrote there. "
            f"Somebody who is no member has written into the store, {ADVICE}"
        )

    def _secret_key(self, name: str = "secret") -> str:
        return f"{self.generation}/{name}"

    def _agree_fixed(self, held: HeldSecret, records: Sequence[WorkerRecord]) -> bytes:
        first = min(records, key=lambda other: other.id)
        openly = any(other.host != first.host for other in records)
        if first.incarnation == held.record.incarnation:
            if not self._publish(held, "", openly):
                raise self._forged(first)
            if len(records) == 1:
                held.remove()
            return held.value
        for _ in self._patience.tries():
            raw, offer = self._offer()
            if raw and self._take(held, offer, first, openly):
                read = self._board.count(self._secret_key("secret/read"))
                if read >= len(records) - 1 and first.host == held.record.host:
                    Path(offer["path"]).unlink(missing_ok=True)  # nobody else will join: it need not outlive a kill
                return held.value
        raise RendezvousError(f"no secret from {first.describe()} within {self._patience.seconds:g} s")

    def _agree_as_newcomer(self, held: HeldSecret, admission: Admission) -> bytes:
        for _ in self._patience.tries():
            if self._take(held, admission.secret, admission.by, self._proof.require_secret is False):
                return held.value
        raise RendezvousError(f"no secret from {admission.by.describe()} within {self._patience.seconds:g} s")

    def _agree_free(self, held: HeldSecret) -> bytes:
        assert isinstance(self._world, FreeWorld)
        me = held.record.incarnation
        for _ in self._patience.tries():
            alive = self._world.alive(self._world.members())
            raw, offer = self._offer()
            owner = self._owner(offer, alive)
            if owner is not None:
                if self._take(held, offer, owner.record, not self.confined):
                    break
                self._board.put(self._secret_key("wanted"), me)
            elif _is_heir(me, alive) and self._publish(held, raw, False):
                break
        else:
            raise RendezvousError(f"no member of the group handed out its secret within {self._patience.seconds:g} s")
        self._world.trust(held.record, self._patience)
        return held.value

    def _take(self, held: HeldSecret, offer: dict[str, str], owner: WorkerRecord, openly: bool) -> bool:
        """Take the secret that `owner` offers; False if it cannot be had yet. openly: it may stand in the store."""
        if offer.get("owner") != owner.incarnation or ("value" in offer and not openly):
            raise self._forged(owner)
        if owner.host == held.record.host:
            # Whoever writes into the store may say anything: only the file proves who made the secret.
            value = held.read(offer.get("path", ""), owner)
        else:
            value = from_hex(offer["value"]) if "value" in offer else None
        if value is None:
            return False
        if len(value) != SECRET_BYTES or offer.get("value", value.hex()) != value.hex():
            raise self._forged(owner)
        held.value = Secret(value)
        return True

    def _offer(self) -> tuple[str, dict[str, str]]:
        raw = self._board.get(self._secret_key()) or ""
        return raw, self._board.load(self._secret_key(), raw, _offer_from_json) if raw else {}

    def _owner(self, offer: dict[str, str], alive: Sequence[Member]) -> Member | None:
        owners = (member for member in alive if member.record.incarnation == offer.get("owner"))
        return next(owners, None)

    def _asker(self, alive: Sequence[Member]) -> WorkerRecord | None:
        """The member that asked to be sent the secret, if it is still there and has none yet."""
        asker = self._board.get(self._secret_key("wanted"))
        askers = (member.record for member in alive if member.record.incarnation == asker and not member.trusted)
        return next(askers, None)

    def _publish(self, held: HeldSecret, expected: str, openly: bool) -> bool:
        offer = json.dumps(held.offer(openly))
        won = self._board.swap(self._secret_key(), expected, offer) == offer
        if won:
            held.published = offer
        return won


def _parted(members: Sequence[Member], marks: Sequence[bool]) -> tuple[str, str]:
    """Those with the mark and those without it, as one phrase each."""
    parts = [
        [m.record.describe() for m, has in zip(members, marks, strict=True) if has is side] for side in (True, False)
    ]
    return ", ".join(parts[0]), ", ".join(parts[1])


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def _offer_from_json(value: Any) -> dict[str, str]:
    return {"" + key: "" + value[key] for key in value}


def _is_heir(incarnation: str, alive: Sequence[Member]) -> bool:
    """Whether this member may make a new secret: nobody knows an older one, and all others came later."""
    return bool(alive) and alive[0].record.incarnation == incarnation and not any(member.trusted for member in alive)
