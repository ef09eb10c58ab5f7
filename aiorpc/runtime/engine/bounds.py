"""Time limits and sizes of a worker that are no options of the user."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds, unless a comment names another unit. They are read when a wait begins. Each engine has its own.

    Only tests change them.
    """

    # Connecting.
    connect: float = 30.0  # for a worker that refuses connections; the system alone would try for minutes
    refused: float = 1.0  # the same on this host, where a living worker always listens
    handshake: float = 10.0  # for the other end of a new connection to prove itself
    handshakes: int = 256  # handshakes at once, a number: strangers must not use up descriptors
    member_connections: int = 2  # a number: a member's connection to here, and its successor
    opening: float = 1.0  # for running handshakes when the worker leaves
    pipe: float = 10.0  # for the second connection of a link
    accept_pause: float = 0.5  # before connections are accepted again after the system refused one

    # A link that ends.
    pipe_grace: float = 1.0  # from the end of the second connection to that of the first
    drain: float = 1.0  # for messages on the second connection after the first one ended
    release_pause: float = 0.01  # until freed memory of the other end is returned

    # The group, and the store where it meets.
    vouch: float = 5.0  # for a member's answer to an indirect probe
    poll: float = 10.0  # for a member's answer about its activity to the leader
    store: float = 5.0  # for the store when the worker leaves; longer than the waits of `Rendezvous.close`
    look: float = 5.0  # for the store when a name is looked up
    farewell: float = 3.0  # for the store to tell whether an unreachable member has left
    serving_pause: float = 0.25  # between two looks at the store of a free group for joining members
    absence: float = 5.0  # off the list of a free group before a worker enters it again
    founding: float = 2.0  # for members of an earlier store at ``tcp://``, before a free group begins there
    return_pause: float = 0.5  # between two tries to find a lost store again; shorter than `founding`
    foreign_pause: float = 5.0  # the same if others have begun a group of their own
    overtime: float = 2.0  # for joining to end by itself after its time is up
    rest: float = 60.0  # without a message, until a connection of a free group over TCP lets go of its socket

    # Published values.
    stalled: float = 5.0  # without progress of the reader that fetches for its host; then another one takes over

    # Leaving.
    grace: float = 3.0  # for waits of a worker's own program after its door is closed
    told: float = 10.0  # until a leaving worker logs what it waits for
    given_up: float = 5.0  # for the answer to an abandoned call, which still counts

    # Closing; work that is not done in this time is abandoned.
    tasks: float = 1.0
    threads: float = 1.0
    connections: float = 1.0
    devices: float = 1.0

    # Contexts of autograd.
    leave_context: float = 5.0  # for sending the end of a context to all workers
    piggyback_pause: float = 0.01  # for another message that carries it
