"""How long one worker waits for what may never come, and how much it takes, where no option of the user says so."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds, where nothing else is said. They are read when a wait begins; a worker has those of its engine.

    To change them is for tests, which cannot wait as long as a program may have to.
    """

    # Connecting.
    connect: float = 30.0  # for a worker that refuses connections; the system alone would try for minutes
    refused: float = 1.0  # for one of this host that does: a worker listens for as long as it lives
    handshake: float = 10.0  # for whoever has connected to prove itself
    handshakes: int = 256  # connections that may be in their handshake at once: strangers must not use up descriptors
    member_connections: int = 2  # that one member may have opened to here: its own, and one that takes its place
    opening: float = 1.0  # for handshakes that are under way when the worker leaves
    pipe: float = 10.0  # for the second connection of a link
    accept_pause: float = 0.5  # until connections are taken again after the system has refused one

    # A link that ends.
    pipe_grace: float = 1.0  # between the end of the second connection and that of the first, which may say why
    drain: float = 1.0  # for what was written to the second connection before the first one ended
    release_pause: float = 0.01  # until memory of the other end that was let go here is given back

    # The group, and the store where it meets.
    vouch: float = 5.0  # for a member to say that it is there, when somebody says that it is not
    poll: float = 10.0  # for one answer of a member that the leader asks for its activity
    store: float = 5.0  # for the store when the worker leaves; longer than `Rendezvous.close` waits for others
    look: float = 5.0  # for the store when a name is looked up
    farewell: float = 3.0  # for the store to say whether a member that cannot be reached has left
    serving_pause: float = 0.25  # between two looks at the store of a free group for joining members
    absence: float = 5.0  # off the list of a free group, as others have struck it off, before a worker enters it again
    founding: float = 2.0  # for members of an earlier store at ``tcp://``, before a free group is begun there
    return_pause: float = 0.5  # between two tries to find a store again that has gone; shorter than `founding`
    foreign_pause: float = 5.0  # the same where others have begun a group of their own
    overtime: float = 2.0  # for joining to end by itself once its time is up

    # Published values.
    stalled: float = 5.0  # for who fetches for its host to show that it goes on; then another one takes over

    # Leaving.
    grace: float = 3.0  # for what a worker's own program waits for, once its door is closed
    told: float = 10.0  # until a worker that leaves by itself says in the log what it still waits for
    given_up: float = 5.0  # for the answer to a call that nobody waits for any more, and that still counts

    # Closing; what is still under way after these is left to itself.
    tasks: float = 1.0
    threads: float = 1.0
    connections: float = 1.0
    devices: float = 1.0

    # Contexts of autograd.
    leave_context: float = 5.0  # for telling all workers that a context was left
    piggyback_pause: float = 0.01  # for another message to come, with which it is told
