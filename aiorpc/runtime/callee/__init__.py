"""The callee's side of a call: from its message to its answer.

Owns: the calls of one connection (`Service`), finding their functions (`Resolver`), running them (`Runner`), their
answers (`Answers`), and the producing end of streams.

Shows: `Service`.

Must not touch: the caller's side.
"""
