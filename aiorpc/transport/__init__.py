"""Transports: bytes between two workers. ``unix`` on one host, ``tcp`` between hosts."""
