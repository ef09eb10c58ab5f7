"""Which channels are installed, and which of them the two ends of a link use.

A channel is an entry point of the group `aiorpc.channels`, ours and those of other packages in the same way. An entry
point names a callable, which takes the worker (`Links`) and returns a `ChannelContext`. Both ends of a link introduce
themselves with the descriptors of their contexts. Both then compare the same pairs of descriptors, the opener's first,
and choose the same channels.

Trust: a channel is used only if both ends have it, by its name. A peer's descriptor chooses among what is installed
here, and never loads anything.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from ...channels import ChannelContext, ChannelLink
from ...errors import ProtocolError
from ...logs import logger
from ...protocol.packing import shown
from .messages import DEVICE, SHARED

GROUP = "aiorpc.channels"
#: Ours have fixed numbers on the wire. They are listed here, and not in pyproject.toml, for use from a source tree.
OURS: Mapping[int, EntryPoint] = {
    SHARED: EntryPoint("shared memory", "aiorpc.runtime.links.sharing:SharingContext", GROUP),
    DEVICE: EntryPoint("device", "aiorpc.runtime.links.on_devices:DeviceContext", GROUP),
}
#: Channels of other packages have numbers from here on: their positions in the order of the names in use.
FIRST_NUMBER = 16


class InstalledChannel(NamedTuple):
    """A channel that this worker has. number: in messages; 0 if each link numbers it."""

    number: int
    context: ChannelContext


def find_channels(worker: Any) -> list[InstalledChannel]:
    """The installed channels, for a worker that starts. A channel that cannot be loaded is logged and left out."""
    found = [InstalledChannel(number, entry.load()(worker)) for number, entry in OURS.items()]
    names = {each.context.name for each in found}
    for entry in _of_others(tuple(sys.path)):
        try:
            context = entry.load()(worker)
            if not isinstance(context, ChannelContext) or not context.name or context.name in names:
                raise TypeError(f"{context!r:.100} is no ChannelContext with a name of its own")
        except Exception as error:
            logger.warning("the channel %s (%s) is not used: %r", entry.name, entry.value, error)
            continue
        names.add(context.name)
        found.append(InstalledChannel(0, context))
    return found


@lru_cache(1)
def _of_others(_: tuple[str, ...]) -> list[EntryPoint]:
    """The channels of other packages. The argument is `sys.path`, on which that depends.

    Reading about all packages takes 10 ms, and a process may have many workers.
    """
    return sorted(entry_points(group=GROUP))


def at_once(registered: list[InstalledChannel]) -> list[InstalledChannel]:
    """The channels that a link has from its start: every worker of this version has them."""
    return [each for each in registered if each.number == DEVICE]


def agree(
    registered: list[InstalledChannel], link: ChannelLink, mine: Mapping[str, object], theirs: Mapping[str, object]
) -> list[InstalledChannel]:
    """The channels that this link uses, each with its number, in the order in which they are asked.

    mine, theirs: the descriptors of both ends, by the names of the channels. Raises ProtocolError for an impossible
    descriptor of theirs.
    """
    agreed: list[InstalledChannel] = []
    for number, context in sorted(registered, key=lambda each: each.context.name):
        name = context.name
        if name not in mine:
            continue
        if name not in theirs and number == DEVICE:
            raise ProtocolError(f"a worker that says nothing of the channel {name}")
        if name not in theirs:
            context.refused(link, "")
            continue
        pair = (mine[name], theirs[name]) if link.opener else (theirs[name], mine[name])
        try:
            reason = context.obstacle(*pair)
        except Exception as error:
            raise ProtocolError(
                f"a descriptor of the channel {name} that cannot be: {shown(theirs[name])}: {error}"
            ) from None
        if reason:
            context.refused(link, reason)
        else:
            others = sum(each.number >= FIRST_NUMBER for each in agreed)
            agreed.append(InstalledChannel(number or FIRST_NUMBER + others, context))
    return sorted(agreed, key=lambda each: (-each.context.priority, each.context.name))
