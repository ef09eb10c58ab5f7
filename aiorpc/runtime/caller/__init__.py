"""The caller's side of a call: from the user's call to its Future.

Owns: the other workers as peers, by name and id, the pending calls, their Futures, and the consuming end of streams.

Shows: `Peers`, `Peer`, `PeerHandle`, `Stream`.

Must not touch: membership, which the package `group` decides.
"""
