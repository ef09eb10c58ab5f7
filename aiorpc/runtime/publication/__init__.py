"""Values that one worker publishes under a name, for all others to read: the newest version, one copy for each host.

Owns: the leases to names that this worker knows, the versions that it publishes and their readers (`Publisher`), and
what its own subscriptions fetch (`Prefetcher`).
Shows: `Publications` with the verbs; `Publication`, `Subscription`, `PublishedVersion` and `Delivery` for the program.
Must not touch: membership, which belongs to the group; memory, which `channels/slots.py` makes and accounts for.
"""
