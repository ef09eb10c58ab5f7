"""Handles of values on other workers, and the values that this worker owns.

Owns: `RRef`, the values by reference, and carrying out what `protocol.references` decides about their counting.

Shows: `References`, `RRef`.

Must not touch: finding and connecting peers, which `WorkerForReferences` offers.
"""
