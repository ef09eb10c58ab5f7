"""Who may publish a name for this worker, and who may read it here: the option ``allow``, asked in one place.

A rule uses the patterns ``published/NAME:publish`` and ``published/NAME:read``. Each worker decides for itself: it
follows no publisher whose role may not publish the name here, and gives versions to no reader whose role may not read
it.
"""

from __future__ import annotations

from ...errors import NotAllowed
from ...protocol.identity import WorkerRecord
from ...rights import Rights

KIND, PUBLISH, READ = "published", "publish", "read"


class Access:
    """Checks the rules for published names. Any thread."""

    def __init__(self, rights: Rights, own: WorkerRecord) -> None:
        """own: the record of this worker, which its own rules do not limit."""
        self._rights = rights
        self._own = own

    def may_publish(self, record: WorkerRecord, name: str) -> bool:
        """Whether this worker takes versions of a name from that member."""
        return self._may(record, name, PUBLISH)

    def may_read(self, record: WorkerRecord, name: str) -> bool:
        """Whether this worker gives versions of a name to that member."""
        return self._may(record, name, READ)

    def check_publish(self, record: WorkerRecord, name: str) -> None:
        """Raise NotAllowed if this worker takes no versions of a name from that member."""
        if not self.may_publish(record, name):
            raise self._refusal(record, name, PUBLISH)

    def check_read(self, record: WorkerRecord, name: str) -> None:
        """Raise NotAllowed if this worker gives no versions of a name to that member."""
        if not self.may_read(record, name):
            raise self._refusal(record, name, READ)

    def why_not(self, record: WorkerRecord, name: str) -> str:
        """Why this worker takes no versions of a name from that member."""
        return (
            f"{self._rights.describe(record.role)}, and not {KIND}/{name}:{PUBLISH}, on worker {self._own.name!r} (id "
            f"{self._own.id})"
        )

    def _may(self, record: WorkerRecord, name: str, verb: str) -> bool:
        return record.incarnation == self._own.incarnation or self._rights.allowed_resource(
            record.role, KIND, name, verb
        )

    def _refusal(self, record: WorkerRecord, name: str, verb: str) -> NotAllowed:
        rule, pattern = self._rights.describe(record.role), f"{KIND}/{name}:{verb}"
        what = "takes no versions of it from" if verb == PUBLISH else "gives no versions of it to"
        return NotAllowed(
            f"{record.describe()} may not {verb} {name!r}: worker {self._own.name!r} {what} that role, as its option "
            f"{rule}. Add {pattern!r} to that rule",
            worker=self._own.name,
            caller=record.name,
            role=record.role,
            function=pattern,
            rule=rule,
        )
