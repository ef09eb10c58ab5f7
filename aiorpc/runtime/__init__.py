"""One worker at work.

`node` puts the parts together, `lifecycle` makes a node and takes it down, and `aiorpc.worker` has the class for
programs. The packages of this folder hold the parts. Imports between them point downward, as the drawing in
`docs/inside/architecture.md` shows.
"""
