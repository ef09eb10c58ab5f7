"""The traffic with other workers: messages out and in, and the buffers that travel apart.

Owns: the exit and the entrance of all messages (`Link.send`, `Link.on_frames`), which channel takes which buffer
(`Distribution`), putting messages together, the memory and the devices that links share.

Shows: `Links`, `Link`, `Memory`, `Accelerators`.

Must not touch: the contents of messages: calls and answers belong to the receiver.
"""
