"""Values that one worker publishes under a name, for all others to read: the newest version, one copy for each host.

Owns: the leases to names as this worker knows them, the versions that it publishes and who has them (`Publisher`),
what its own subscriptions get (`Prefetcher`).
Shows: `Publications` with the verbs; `Publication`, `Subscription`, `PublishedVersion` and `Delivery` for the program.
Must not touch: who is a member, which it asks the group; memory, which `channels/slots.py` makes and accounts for.
"""
