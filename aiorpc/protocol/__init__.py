"""The protocol without I/O: frames, handshake, values, references. Bytes in, events out; no loop, socket or thread."""
