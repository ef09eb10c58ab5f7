"""A worker's autograd contexts.

Owns: tensors that require gradients and were sent or received within a context, and the targets of their gradients.

Shows: `Gradients`, `AutogradContext`, `Tape`.

Must not touch: messages: a tape only records the tensors of a message.
"""
