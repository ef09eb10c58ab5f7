"""Handles of values on other workers, and the values that this one owns.

Owns: `RRef`, the values by reference, and carrying out what `protocol.references` decides about their counting.

Shows: `References`, `RRef`.

Must not touch: how a peer is found or connected: `WorkerForReferences` says so.
"""
