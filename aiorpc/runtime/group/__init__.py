"""Who is in the group, and how connections to its members come to be.

Owns: joining and loss of members as events, leaving together (by `protocol.leaving`), listening sockets, handshakes.

Shows: `Group`, `Acceptor`, `Connector`, `Events`.

Must not touch: calls of users: it only asks whether there are any.
"""
