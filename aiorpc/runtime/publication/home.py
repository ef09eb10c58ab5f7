"""What published values need of the worker."""

from __future__ import annotations

from typing import Protocol

from ..caller.peers import Peers
from ..engine.engine import Engine
from ..group.events import Events
from ..group.group import Group
from ..links.links import Links
from ..meeting.rendezvous import Rendezvous


class Home(Protocol):
    """The part of a `Node` that published values use."""

    engine: Engine
    rendezvous: Rendezvous
    links: Links
    peers: Peers
    group: Group
    events: Events
