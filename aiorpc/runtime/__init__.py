"""One worker at work.

`node` puts the parts together, `life` makes a node and takes it down, `worker` is what the program that makes a worker
knows of it. The parts are in rooms, the packages of this folder; imports point downward between them, and
`docs/inside/design.md` opens with a drawing of them.
"""
