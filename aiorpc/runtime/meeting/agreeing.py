"""Agreeing on the secret of a group through its store, where the members have to make one themselves. Blocking.

Keys, G being the number of the generation:

    G/secret              who offers the secret, and where its file is; the secret itself only if it may stand there
    G/secret/read         how many have read the file
    G/wanted              who cannot read the file, and asks for the secret
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import RendezvousError
from ...protocol.identity import WorkerRecord
from ..engine.host import sees
from .board import Board
from .fixed import FixedWorld
from .free import FreeWorld
from .held import ADVICE, SECRET_BYTES, HeldSecret, from_hex
from .meeting_place import MeetingPlace, is_local, is_loopback
from .membership import SET_IT, Member, Proof
from .patience import Patience
from .returning import Admission
from .secret import Secret

_READING_TIME = 2.0


class LeaderLeft(RendezvousError):
    """The leader that has let a newcomer in left before that had the secret; the next leader may let it in."""


class Agreement:
    """One member's part in it. Made anew for each step, as the store may be another one by then.

    confined: all members have to be on this host.
    """

    def __init__(
        self, board: Board, place: MeetingPlace, world: FixedWorld | FreeWorld, proof: Proof, *, confined: bool
    ) -> None:
        self._board = board
        self._place = place
        self._world = world
        self._proof = proof
        self._confined = confined

    # --- before there is a secret -------------------------------------------------------------------------------------

    def check_alike(self) -> None:
        """RendezvousError if members would refuse each other: else their first calls would tell them, and as a loss."""
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
        if isinstance(self._world, FreeWorld):
            members = self._world.alive(members)  # whoever has died refuses nobody
        safe, free = _parted(members, [member.safe for member in members])
        if safe and free:
            raise RendezvousError(
                f"{safe} have serialization='safe', {free} have 'free': give it the same value on all workers"
            )

    def check_allowed(self, record: WorkerRecord, records: Sequence[WorkerRecord]) -> None:
        """RendezvousError if these members, of whom `record` is this one, may not make their secret themselves."""
        others_than_here = [other for other in records if other.host != record.host]
        far = [other.describe() for other in others_than_here]
        place = self._place
        if self._confined and far and all(sees(record.host, other.host) for other in others_than_here):
            raise RendezvousError(
                f"AIORPC_SECRET is not set, and {', '.join(far)} would be run by another user of this host than "
                f"{record.describe()}. Neither may read a file with a secret that the other one has made. "
                f"{_upper(SET_IT)}. Or give tls= to all, with certificates that bear their names. If there is to be "
                "no worker of another user, somebody else has written into the store"
            )
        if self._confined and far:
            raise RendezvousError(
                f"the store at {place} says that {', '.join(far)} would be on another host or in another "
                f"container, but that place is on this host alone. Somebody else has written into the store, {ADVICE}"
            )
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
        container = "in another container, or of another user" if far else "or in another container"
        raise RendezvousError(
            f"AIORPC_SECRET is not set, and {where} on another host than {record.describe()}, {container}. "
            f"{_upper(SET_IT)}. Or give tls= to all, with certificates that bear their names. Or give "
            "require_secret=False to all: then their secret goes through the store, and whoever reaches "
            f"{place} is trusted to run code on all of them"
        )

    # --- making it, or taking it --------------------------------------------------------------------------------------

    def reach(
        self, held: HeldSecret, records: Sequence[WorkerRecord], admission: Admission | None, patience: Patience
    ) -> bytes:
        """The secret, which `held` then has. RendezvousError if it cannot be had, or somebody else was at the store.

        admission: of a newcomer to a group of fixed size. LeaderLeft if that is of no use any more.
        """
        if admission is not None:
            value = self._reach_as_newcomer(held, admission, patience)
        elif isinstance(self._world, FreeWorld):
            value = self._reach_free(self._world, held, patience)
        else:
            value = self._reach_fixed(held, records, patience)
        if held.published and self._offer()[0] != held.published:  # what we offer has to stand there as we wrote it
            raise self._forged(held.record)
        return value

    def _reach_fixed(self, held: HeldSecret, records: Sequence[WorkerRecord], patience: Patience) -> bytes:
        first = min(records, key=lambda other: other.id)
        openly = any(other.host != first.host for other in records)
        if first.incarnation == held.record.incarnation:
            if not self._publish(held, "", openly):
                raise self._forged(first)
            if len(records) == 1:
                held.remove()
            return held.value
        for _ in patience.tries():
            raw, offer = self._offer()
            if raw and self._take(held, offer, first, openly):
                read = self._board.count(self._key("secret/read"), at_most=True)
                if read >= len(records) - 1 and first.host == held.record.host:
                    Path(offer["path"]).unlink(missing_ok=True)  # nobody else will join: it need not outlive a kill
                return held.value
        raise RendezvousError(f"no secret from {first.describe()} within {patience.seconds:g} s")

    def _reach_as_newcomer(self, held: HeldSecret, admission: Admission, patience: Patience) -> bytes:
        for _ in patience.tries():
            if self._take(held, admission.secret, admission.by, self._proof.require_secret is False):
                return held.value
            if isinstance(self._world, FixedWorld) and self._world.has_ended(admission.by):
                raise LeaderLeft(f"{admission.by.describe()}, which has let this worker in, has left since")
        raise RendezvousError(f"no secret from {admission.by.describe()} within {patience.seconds:g} s")

    def _reach_free(self, world: FreeWorld, held: HeldSecret, patience: Patience) -> bytes:
        me = held.record.incarnation
        for _ in patience.tries():
            alive = world.alive(world.members())
            raw, offer = self._offer()
            owner = self._owner(offer, alive)
            if owner is not None:
                if self._take(held, offer, owner.record, not self._confined):
                    break
                self._board.put(self._key("wanted"), me)
            elif _is_heir(me, alive) and self._publish(held, raw, False):
                break
        else:
            raise RendezvousError(f"no member of the group handed out its secret within {patience.seconds:g} s")
        world.trust(held.record, patience)
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

    # --- handing it out -----------------------------------------------------------------------------------------------

    def serve(self, held: HeldSecret, world: FreeWorld, alive: Sequence[Member]) -> None:
        """Hand the secret to who asks for it, if that is for this member of a free group to do. It does not wait."""
        raw, offer = self._offer()
        asker = self._asker(alive)
        far = asker is not None and asker.host != held.record.host and not self._confined
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

    def await_readers(self, held: HeldSecret) -> None:
        """Wait a little until the others have read our file: a rank may leave before others have begun."""
        if isinstance(self._world, FixedWorld) and held.path is not None:
            others = self._world.world_size - 1
            for _ in Patience(_READING_TIME).tries():
                if self._board.number(self._key("secret/read")) >= others:
                    return

    def _asker(self, alive: Sequence[Member]) -> WorkerRecord | None:
        """The member that asked to be sent the secret, if it is still there and has none yet."""
        asker = self._board.get(self._key("wanted"))
        askers = (member.record for member in alive if member.record.incarnation == asker and not member.trusted)
        return next(askers, None)

    # --- what stands in the store -------------------------------------------------------------------------------------

    def _key(self, name: str = "secret") -> str:
        return f"{self._world.generation}/{name}"

    def _offer(self) -> tuple[str, dict[str, str]]:
        raw = self._board.get(self._key()) or ""
        return raw, self._board.load(self._key(), raw, _offer_from_json) if raw else {}

    def _owner(self, offer: dict[str, str], alive: Sequence[Member]) -> Member | None:
        owners = (member for member in alive if member.record.incarnation == offer.get("owner"))
        return next(owners, None)

    def _publish(self, held: HeldSecret, expected: str, openly: bool) -> bool:
        offer = json.dumps(held.offer(openly))
        won = self._board.swap(self._key(), expected, offer) == offer
        if won:
            held.published = offer
        return won

    def _forged(self, owner: WorkerRecord) -> RendezvousError:
        return RendezvousError(
            f"the store at {self._place} does not say of the group's secret what {owner.describe()} wrote there. "
            f"Somebody who is no member has written into the store, {ADVICE}"
        )


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
