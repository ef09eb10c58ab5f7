"""What a worker remembers of autograd contexts.

Owns: tensors that require gradients and were sent or received within a context, and where their gradients go.

Shows: `Gradients`, `AutogradContext`, `Tape`.

Must not touch: messages: a tape only says what a message has to tell of its tensors.
"""
