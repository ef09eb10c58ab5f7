"""A member's entry in the store, and the proof of membership."""

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
    """How a worker proves its membership, and checks that of the others.

    key: made of AIORPC_SECRET; None without. require_secret: the option. certificates: they replace AIORPC_SECRET,
    because every connection shows a certificate with the worker's name. safe: whether it reads no pickles (option
    `serialization`); members of both kinds refuse each other.
    """

    key: bytes | None = field(default=None, repr=False)
    require_secret: bool | None = None
    certificates: bool = False
    safe: bool = False

    @property
    def lacks_secret(self) -> bool:
        """Whether the worker requires a secret and has none, and so cannot join."""
        return self.require_secret is True and self.key is None

    def member(self, record: WorkerRecord, claims: DeviceClaims, generation: int) -> Member:
        """The entry of the worker with that record in that generation."""
        own = self.key is not None
        member = Member(record, own, claims, "", self.require_secret, self.certificates, self.safe)
        return member.sealed(self.key, generation)


@dataclass(frozen=True)
class Member:
    """A member's entry in the store: its record, and what the others need only to join.

    own_secret: the worker brought AIORPC_SECRET. claims: about its devices; not in the record, which goes over each
    connection. require_secret: its option of that name. certificates: they prove membership where there is no
    AIORPC_SECRET. safe: it reads no pickles. seal: a message authentication code of these fields, made with
    AIORPC_SECRET; "" without.
    """

    record: WorkerRecord
    own_secret: bool = False
    claims: DeviceClaims = field(default_factory=DeviceClaims)
    seal: str = ""
    require_secret: bool | None = None
    certificates: bool = False
    safe: bool = False

    def sealed(self, key: bytes | None, generation: int) -> Member:
        """With the seal for that generation; unchanged without AIORPC_SECRET."""
        return self if key is None else replace(self, seal=self._seal(key, generation))

    def check(self, key: bytes | None, generation: int) -> None:
        """RendezvousError if the seal is wrong."""
        if not self.is_known(key, generation):
            raise RendezvousError(
                f"what the rendezvous store says of {self.record.describe()} was not written by a worker with our "
                "AIORPC_SECRET: either that differs between the workers, or a stranger has written into the store"
            )

    def is_known(self, key: bytes | None, generation: int) -> bool:
        """Whether its seal is right. True of a member that has no key: `Agreement` refuses mixtures."""
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
        """The member; RendezvousError if `value` is none, PeerRefused if it is of another version."""
        # Every version of the format has its number at the end.
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
    """For errors: advice if one process has joined twice, as when a cell is run again."""
    if (holder.host, holder.pid) != (record.host, record.pid):
        return ""
    return (
        f"Both are of this very process: it has the worker {holder.name!r} already, and goes on with that. To join "
        "anew, as when a cell is run again, leave first: `await worker.shutdown()`, or `rpc.shutdown()`. "
    )
