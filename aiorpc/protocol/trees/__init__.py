"""Values as a tree: the serialization of a group that reads no pickles (``serialization="safe"``).

A tree is msgpack. It cannot name a function to call, because it has no way of saying that: what msgpack has no type for
is a list that begins with a mark, a number of `Mark`, and each mark has one method here that reads it, which checks
what it is given. Dense tensors leave the tree, as they leave a pickle; an extension says their number. The only names
are those of registered classes and functions (`registered`), of numpy's and torch's plain types, and of torch's named
tuples.

What a tree does not keep: which lists, dicts and objects were the same (tensors do), and bytearrays and memoryviews,
which arrive as bytes. Something that contains itself is refused.

The parts of tensors that say where to look in memory (indices, offsets, sizes) are checked before a tensor is made of
them, and copied before that: the memory that they arrive in may be shared with their sender.
"""

from __future__ import annotations

from .marks import Brought, Collected, Mark
from .reading import fill, read_tree
from .writing import write_tree

__all__ = ["Brought", "Collected", "Mark", "fill", "read_tree", "write_tree"]
