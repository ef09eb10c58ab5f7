"""What calls to several workers need of the worker that makes them."""

from __future__ import annotations

from typing import Protocol

from ..caller.peers import Peers
from ..caller.retrying import Retries
from ..calls.current import CommonHome
from ..gradients.contexts import Gradients
from ..group.events import Events
from ..group.group import Group
from ..links.memory import Memory
from ..references.references import References


class Home(CommonHome, Protocol):
    """The part of a `Node` that calls to several workers use."""

    peers: Peers
    events: Events
    group: Group
    references: References
    retries: Retries
    memory: Memory
    gradients: Gradients
