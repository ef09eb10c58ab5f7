"""Digests of versions: a reader compares what another worker handed on with what the publisher has published.

Readers ask only the publisher for digests. It computes none before the first question.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from functools import partial

from ...channels.segments import Bytes
from ...protocol.identity import WorkerRecord
from ...protocol.packing import pack
from ...protocol.publication import Edition
from ..engine.engine import Engine
from .version_store import in_background

# Digests that a publisher keeps of its latest versions.
MOST_KEPT = 64


def digest_of(name: str, edition: Edition, bodies: Sequence[bytes], data: Bytes) -> bytes:
    """The digest of a version: of its edition, its bodies and all its bytes. Slow; run it in a thread.

    It covers only the fields of the edition that are the same for all readers. SHA-256 is the fastest hash of hashlib
    on processors with instructions for it (1.7 GB/s).
    """
    said = [name, edition.version, edition.publisher, edition.worker, edition.main, edition.size, edition.spans]
    digest = hashlib.sha256(pack([*said, *bodies]))
    digest.update(data.data)
    return digest.digest()


async def is_digest(
    engine: Engine, answer: object, name: str, edition: Edition, bodies: Sequence[bytes], data: Bytes
) -> bool:
    """Whether `answer`, the publisher's, is the digest of a version that arrived here."""
    computed: bytes = await in_background(engine, partial(digest_of, name, edition, bodies, data))
    return type(answer) is bytes and answer == computed


def changed(source: WorkerRecord, version: int, name: str, publisher: WorkerRecord) -> str:
    """The error text for a version that differs from what its publisher has published."""
    return (
        f"what {source.describe()} hands on as version {version} of {name!r} is not what "
        f"{publisher.describe()} has published; it comes from there from now on"
    )


class Digests:
    """The digests of one name at its publisher, by version. On the loop. wanted: whether any reader has asked."""

    def __init__(self) -> None:
        self.wanted = False
        self._tasks: dict[int, asyncio.Task[bytes]] = {}

    def get(self, version: int) -> asyncio.Task[bytes] | None:
        """The digest of a version, once it is computed; None if it was not begun, or is too old."""
        return self._tasks.get(version)

    def put(self, version: int, task: asyncio.Task[bytes]) -> None:
        """Keep the task that computes the digest of a version."""
        self._tasks[version] = task
        while len(self._tasks) > MOST_KEPT:
            del self._tasks[next(iter(self._tasks))]
