"""Calls to several workers at once.

Owns: which workers a group of peers means at the moment (`members`), one call written once for all of them (`sending`)
and what becomes of it (`group_call`, `outcomes`). `peer_group` has the verbs.

Shows: `PeerGroup`, `GroupCall`, `Outcomes`.

Must not touch: how one call travels: each member's is a call of its own, with its own number, deadline and end.
"""
