"""A member of a group as it stands in the store, and the proof by which the others know it for one."""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass, field, replace

from ...devices import DeviceClaims
from ...errors import DeviceMapError, PeerRefused, ProtocolError, RendezvousError
from ...protocol.handshake import VERSION
from ...protocol.identity import WorkerRecord

SET_IT = (
    "set AIORPC_SECRET (or secret_file) for all workers, to the same random text of at least 16 bytes (openssl rand "
    "-hex 32)"
)
_NO_WORKER = "something that is no worker"


@dataclass(frozen=True)
class Proof:
    """By what a worker lets itself be known as a member, and by what it knows the others.

    key: made of AIORPC_SECRET; None without. require_secret: the option. certificates: without AIORPC_SECRET they will
    do, as every connection shows one that bears the name of its worker. safe: whether it reads no pickles (option
    `serialization`): members of both kinds refuse each other.
    """

    key: bytes | None = field(default=None, repr=False)
    require_secret: bool | None = None
    certificates: bool = False
    safe: bool = False

    @property
    def lacks_secret(self) -> bool:
        """Whether the worker cannot join, as it requires a secret and has none."""
        return self.require_secret is True and self.key is None

    def member(self, record: WorkerRecord, claims: DeviceClaims, generation: int) -> Member:
        """The worker of that record, as it enters that generation."""
        own = self.key is not None
        member = Member(record, own, claims, "", self.require_secret, self.certificates, self.safe)
        return member.sealed(self.key, generation)


@dataclass(frozen=True)
class Member:
    """A member as it stands in the store: its record, and what the others need only to join.

    own_secret: the worker brought AIORPC_SECRET. claims: what it says of its devices; not in the record, which goes
    over each connection. require_secret: its option of that name. certificates: it takes them for the proof of
    membership, where there is no AIORPC_SECRET. safe: it reads no pickles. seal: a message authentication code of all
    that, made with AIORPC_SECRET; "" without.
    """

    record: WorkerRecord
    own_secret: bool = False
    claims: DeviceClaims = field(default_factory=DeviceClaims)
    seal: str = ""
    require_secret: bool | None = None
    certificates: bool = False
    safe: bool = False

    def sealed(self, key: bytes | None, generation: int) -> Member:
        """As a member that has AIORPC_SECRET enters it into that generation; as it is without one."""
        return self if key is None else replace(self, seal=self._seal(key, generation))

    def check(self, key: bytes | None, generation: int) -> None:
        """RendezvousError if it is not known to be a member."""
        if not self.is_known(key, generation):
            raise RendezvousError(
                f"what the rendezvous store says of {self.record.describe()} was not written by a worker with our "
                "AIORPC_SECRET: either that differs between the workers, or somebody else has written into the store"
            )

    def is_known(self, key: bytes | None, generation: int) -> bool:
        """Whether it bears the seal that it ought to. One that says it has no key is: `Rendezvous` refuses mixtures."""
        if key is None or not self.own_secret:
            return True
        return hmac.compare_digest(self._seal(key, generation).encode(), self.seal.encode())

    def _seal(self, key: bytes, generation: int) -> str:
        asked = [self.require_secret, self.certificates, self.safe]
        said = ["aiorpc member", generation, self.record.to_wire(), self.own_secret, self.claims.to_json(), *asked]
        return hmac.digest(key, json.dumps(said).encode(), "sha256").hex()

    def to_json(self) -> list[object]:
        """The form `from_json` reads."""
        asked = [self.require_secret, self.certificates, self.safe]
        return [self.record.to_wire(), self.own_secret, self.claims.to_json(), self.seal, *asked, VERSION]

    @classmethod
    def from_json(cls, value: object) -> Member:
        """The member; RendezvousError if something else stands there, PeerRefused if it is of another version."""
        # The version stands at the end for ever; what is before it may differ.
        if isinstance(value, list) and value and type(value[-1]) is int and value[-1] != VERSION:
            raise PeerRefused(
                f"a worker has come that speaks version {value[-1]} of the protocol, we speak {VERSION}; use one "
                "aiorpc everywhere"
            )
        if not isinstance(value, list) or len(value) != 8 or not isinstance(value[3], str) or not value[3].isascii():
            raise RendezvousError(_NO_WORKER)
        try:
            record, claims = WorkerRecord.from_wire(value[0]), DeviceClaims.from_json(value[2])
            required = value[4] if isinstance(value[4], bool) else None
            own, certificates, safe = (value[place] is True for place in (1, 5, 6))
            return cls(record, own, claims, value[3], required, certificates, safe)
        except (ProtocolError, DeviceMapError) as error:
            raise RendezvousError(f"{_NO_WORKER} ({error})") from None


def same_process(holder: WorkerRecord, record: WorkerRecord) -> str:
    """For errors: what to do if a process has joined twice, as one whose cell was run again."""
    if (holder.host, holder.pid) != (record.host, record.pid):
        return ""
    return (
        f"Both are of this very process: it has the worker {holder.name!r} already, and goes on with that. To join "
        "anew, as when a cell is run again, leave first: `await worker.shutdown()`, or `rpc.shutdown()`. "
    )
