"""What the caller's and the callee's side of a call have in common.

Owns: how functions are named, found and run (`functions`), how values become messages (`values`), exceptions on the
wire (`failures`), batches (`batching`), and which worker and call the running code belongs to (`current`).

Shows: `encode`, `decode`, `Handler`, `ServedCall`, `registry`.

Must not touch: connections: what is made here is sent by others.
"""
