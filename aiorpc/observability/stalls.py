"""The option ``stall_warning``: a worker logs what is wrong with its group when its calls have waited for long."""

from __future__ import annotations

import threading
import time

from .. import foreign
from ..logs import logger
from ..runtime.caller.pending import MadeCall
from ..runtime.node import Node
from ..sites import describe_site
from ..threads import daemon
from . import diagnosis, outside, reader, wait_graph
from .making import mark_of
from .reader import CannotLook, SeenGroup

#: Seconds between two looks at the calls of the worker, at most.
_EVERY = 1.0
#: Lines of one warning, at most.
_LINES = 60


def _is_of_queue(call: MadeCall) -> bool:
    return call.part_of is not None and call.part_of[0] == "queue"


class StallWatch:
    """Looks at the calls that a worker has made, in a thread of its own. after: seconds that they may wait.

    It warns once, and again when no call has waited for so long in between.
    """

    def __init__(self, node: Node, after: float) -> None:
        self._node = node
        self._after = after
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin."""
        daemon(self._watch, name=f"aiorpc-stalls-{self._node.engine.name}").start()

    def stop(self) -> None:
        """End; does not wait for the thread. Any thread."""
        self._stopped.set()

    def _watch(self) -> None:
        warned = False
        while not self._stopped.wait(min(_EVERY, self._after / 4)):
            try:
                stalled = self._stalled()
                if stalled and not warned:
                    self._warn(*stalled)
                warned = bool(stalled)
            except Exception as error:  # of a worker that is being taken down, or of the system
                if not self._stopped.is_set():
                    foreign.log_error(logger, 30, error, "a look at stalled calls failed")

    def _stalled(self) -> tuple[int, str, MadeCall] | None:
        """How many calls have waited for so long, and the oldest one with the name of its worker."""
        before = time.monotonic() - self._after
        found = [
            (call.started, peer.name, call)
            for peer in self._node.peers.all()
            for call in list(peer.pending.calls.values())
            if call.started <= before and not (call.system or call.streamed or _is_of_queue(call))
        ]
        if not found:
            return None
        _, name, oldest = min(found, key=lambda each: each[0])
        return len(found), name, oldest

    def _warn(self, count: int, to: str, oldest: MadeCall) -> None:
        site = describe_site(oldest._site)
        try:
            text = self._diagnosed()
        except CannotLook as error:
            text = f"the group cannot be looked at: {error}"
        if self._stopped.is_set():
            return
        lines = text.splitlines()
        lines[_LINES:] = ["..."] if len(lines) > _LINES else []
        logger.of(self._node.engine.name).warning(
            "%d calls have waited for more than %g s (stall_warning). "
            "The oldest is %s on worker %r, since %.1f s%s\n%s",
            count,
            self._after,
            oldest.function,
            to,
            time.monotonic() - oldest.started,
            f", made at {site}" if site else "",
            "\n".join(lines),
        )

    def _diagnosed(self) -> str:
        """What is wrong, or else who waits for whom."""
        looks = reader.looks(self._group)
        outside.add_places(looks[-1])
        found = diagnosis.findings(looks)
        text = diagnosis.as_text(found, looks[-1])
        return text if found else f"{text}\n{wait_graph.as_text(wait_graph.build(looks[-1]))}"

    def _group(self) -> SeenGroup:
        mark = mark_of(self._node.engine.record)
        for group in reader.groups():
            if any(report.mark == mark for report in group.reports):
                return group
        raise CannotLook(f"there is no endpoint of process {self._node.engine.record.pid} in {reader.directories()}")
