"""Agreeing on the secret of a group through its store, where the members have no AIORPC_SECRET. Blocking.

Members on one host derive it from the key of their user (`secret.user_key`), and compare fingerprints. The secret goes
through the store only for members on other hosts, and only if all members have ``require_secret=False``. Keys, G being
the number of the generation:

    G/secret              the fingerprint of the group's secret
    G/secret/value        the secret itself, if there are members on other hosts
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ...errors import RendezvousError
from ...protocol.identity import WorkerRecord
from ..engine.host import sees
from .key_value import KeyValueClient, from_hex
from .meeting_place import MeetingPlace, is_local, is_loopback
from .membership import SET_IT, Member, Proof
from .patience import Patience
from .secret import Secret, derived, fingerprint, keep_user_key, user_key

ADVICE = "which is a way to run code in workers: set AIORPC_SECRET for all, or meet in a file of this user's (file://)"
_SECRET_BYTES = 32
# Seconds for the fingerprint of an earlier group at the same store to be replaced.
_SETTLING = 2.0


def check_alike(members: Sequence[Member]) -> None:
    """RendezvousError if members would refuse each other. Without this check their first calls would end with a
    loss."""
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
    safe, free = _parted(members, [member.safe for member in members])
    if safe and free:
        raise RendezvousError(
            f"{safe} have serialization='safe', {free} have 'free': give it the same value on all workers"
        )


class Agreement:
    """One member's part in the agreement. Any thread.

    record: of this member. confined: all members have to be on this host. directory: the private directory of this
    user. value: the secret, once it is known.
    """

    value: Secret

    def __init__(
        self, record: WorkerRecord, place: MeetingPlace, proof: Proof, directory: Path, *, confined: bool
    ) -> None:
        self._record = record
        self._place = place
        self._proof = proof
        self._directory = directory
        self._confined = confined
        self._user_key = b""

    def check_allowed(self, members: Sequence[Member]) -> None:
        """RendezvousError if these members may not agree on a secret themselves."""
        record, place = self._record, self._place
        elsewhere = [each.record for each in members if each.record.host != record.host]
        far = ", ".join(each.describe() for each in elsewhere)
        if self._confined and far:
            self._refuse_far(elsewhere, far)
        if not (far or (place.host and not is_loopback(place) and not is_local(place))):
            return
        careless, others = _parted(members, [member.require_secret is False for member in members])
        if self._proof.require_secret is False and not others:
            return
        if careless and others:
            raise RendezvousError(
                f"require_secret has to be the same on all workers where they or their store are on several hosts: "
                f"{careless} have require_secret=False, {others} have not. {_upper(SET_IT)}"
            )
        where = f"{far} would be" if far else f"the store at {place} is"
        container = "in another container, or of another user" if far else "or in another container"
        raise RendezvousError(
            f"AIORPC_SECRET is not set, and {where} on another host than {record.describe()}, {container}. "
            f"{_upper(SET_IT)}. Or give tls= to all, with certificates that bear their names. Or give "
            "require_secret=False to all: then their secret goes through the store, and everyone who reaches "
            f"{place} is trusted to run code on all of them"
        )

    def _refuse_far(self, elsewhere: Sequence[WorkerRecord], far: str) -> NoReturn:
        """The store is on this host alone, and these members are not, or run as another user."""
        record, place = self._record, self._place
        if all(sees(record.host, each.host) for each in elsewhere):
            raise RendezvousError(
                f"AIORPC_SECRET is not set, and {far} would be run by another user of this host than "
                f"{record.describe()}. Neither may read a file with a secret that the other one has made. "
                f"{_upper(SET_IT)}. Or give tls= to all, with certificates that bear their names. If there is to be "
                "no worker of another user, somebody else has written into the store"
            )
        raise RendezvousError(
            f"the store at {place} says that {far} would be on another host or in another "
            f"container, but that place is on this host alone. Somebody else has written into the store, {ADVICE}"
        )

    def reach(
        self, kv: KeyValueClient, key: str, salt: bytes, members: Sequence[Member], patience: Patience, *, forms: bool
    ) -> Secret:
        """The secret of the group that has that key and salt in its store.

        members: oldest first, or by rank, with this member. forms: whether the group just forms, and so its first
        member has made the secret. RendezvousError if they have another secret.
        """
        self._user_key = user_key(self._directory)
        own = derived(self._user_key, salt)
        first = members[0].record if members else self._record  # a stranger may have emptied the list
        beside = first.host == self._record.host
        if len(members) <= 1:
            kv.put(key, fingerprint(own))  # no earlier member is left
        elif beside:
            kv.swap(key, "", fingerprint(own))
        may_take = self._may_publish(members) and not (beside and forms)
        limit = patience if may_take else Patience(min(patience.left(), _SETTLING), patience.stop)
        for _ in limit.tries():
            print_ = kv.get(key)
            if print_ == fingerprint(own):
                self.value = own
                self._publish(kv, key, members)
                return own
            value = from_hex(kv.get(f"{key}/value") or "") if may_take else b""
            if len(value) == _SECRET_BYTES and fingerprint(value) == print_:
                self.value = Secret(value)
                return self.value
        if may_take:
            raise RendezvousError(f"no member of the group handed out its secret within {patience.seconds:g} s")
        raise RendezvousError(
            f"the store at {self._place} says that {first.describe()} has another secret than the one that this worker "
            f"has from {self._directory}. Either a worker has another TMPDIR or user: give all the same, or set "
            f"AIORPC_SECRET. Or a stranger has written into the store, {ADVICE}"
        )

    def serve(self, kv: KeyValueClient, key: str, members: Sequence[Member]) -> None:
        """Let joining members find the secret, in the user's file, or in the store if that is allowed. OSError."""
        keep_user_key(self._directory, self._user_key)
        self._publish(kv, key, members)

    def _publish(self, kv: KeyValueClient, key: str, members: Sequence[Member]) -> None:
        if self._may_publish(members):
            kv.swap(f"{key}/value", "", self.value.hex())

    def _may_publish(self, members: Sequence[Member]) -> bool:
        far = any(member.record.host != self._record.host for member in members)
        return far and not self._confined and self._proof.require_secret is False


def _parted(members: Sequence[Member], marks: Sequence[bool]) -> tuple[str, str]:
    """Those with the mark and those without it, as one phrase each."""
    parts = [
        [m.record.describe() for m, has in zip(members, marks, strict=True) if has is side] for side in (True, False)
    ]
    return ", ".join(parts[0]), ", ".join(parts[1])


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]
