"""How workers find each other, before there are connections.

Owns: access to torch stores, agreeing on who is in the group, the secret that its members share.

Shows: `Rendezvous`.

Must not touch: the loop: everything here blocks, in threads of its own.
"""
