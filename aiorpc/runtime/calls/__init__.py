"""Code that both sides of a call share.

Owns: how functions are named, found and run (`functions`), how values become messages (`values`), exceptions on the
wire (`failures`), batches (`batching`), and which worker and call the running code belongs to (`current`).

Shows: `encode`, `decode`, `Handler`, `ServedCall`, `registry`.

Must not touch: connections: other packages send the messages.
"""
