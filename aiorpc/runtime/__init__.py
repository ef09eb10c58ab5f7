"""One worker at work.

`node` puts the parts together, `life` makes a node and takes it down, `worker` is what the program that makes a worker
knows of it. The packages of this folder hold the parts; imports point downward between them, as the drawing in
`docs/inside/architecture.md` shows.
"""
