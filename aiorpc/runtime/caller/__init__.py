"""The caller's side of a call: from the user's call to its Future.

Owns: the other workers as peers, by name and id, the calls that they owe us, their Futures, and the consuming end of
streams.

Shows: `Peers`, `Peer`, `PeerHandle`, `Stream`.

Must not touch: who is in the group: that is the group's to say.
"""
