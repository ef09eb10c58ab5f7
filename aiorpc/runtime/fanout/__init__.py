"""Calls to several workers at once.

Owns: the present members of a group of peers (`members`), one call written once for all of them (`sending`) and its
results (`group_call`, `outcomes`). `peer_group` has the verbs.

Shows: `PeerGroup`, `GroupCall`, `Outcomes`.

Must not touch: a single call: each member's has its own number, deadline and end.
"""
