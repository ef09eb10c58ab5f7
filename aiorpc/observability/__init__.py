"""Seeing what workers do, from inside and from outside of their processes."""
