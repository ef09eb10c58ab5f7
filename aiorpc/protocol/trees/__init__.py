"""The safe encoding of values: the serialization of a group that reads no pickles (``serialization="safe"``).

A value becomes a tree of msgpack, which has no way to name a function to call. A value of a type that msgpack lacks is
a list that begins with a mark, a number of `Mark`; one method here reads each mark and checks its items. Dense tensors
leave the tree, as they leave a pickle; an extension holds their number. The only names are those of registered classes
and functions (`registered`), of numpy's and torch's plain types, and of torch's named tuples.

A tree does not keep which lists, dicts and objects were the same (it does for tensors), nor bytearrays and memoryviews,
which arrive as bytes. A value that contains itself is refused.

The parts of tensors that refer to positions in memory (indices, offsets, sizes) are copied and then checked before a
tensor is made of them: the memory that they arrive in may be shared with their sender.
"""

from __future__ import annotations

from .marks import Brought, Collected, Mark
from .reading import fill, read_tree
from .writing import write_tree

__all__ = ["Brought", "Collected", "Mark", "fill", "read_tree", "write_tree"]
