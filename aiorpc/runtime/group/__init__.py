"""The group of a worker: its members, and the connections to them.

Owns: joining and loss of members as events, leaving together (by `protocol.leaving`), listening sockets, handshakes.

Shows: `Group`, `Acceptor`, `Connector`, `Events`.

Must not touch: calls of users, but to ask whether there are any.
"""
