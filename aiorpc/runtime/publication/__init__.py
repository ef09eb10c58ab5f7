"""Values that one worker publishes under a name, for all others to read: the newest version, one copy for each host.

Owns the leases to names that this worker knows, the versions that it publishes and their readers (`Publisher`), and
what its own subscriptions fetch (`Prefetcher`). Offers `Publications` with the verbs, and `Publication`,
`Subscription`, `PublishedVersion` and `Delivery` for the program. The group knows the members; `channels/slots.py`
makes and accounts for memory.
"""
