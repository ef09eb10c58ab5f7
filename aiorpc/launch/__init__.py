"""Groups whose workers an engine for clusters starts and watches, where that is done from inside of a program.

`aiorpc.launch.ray` starts them as actors of Ray. Launchers that start programs (torchrun, Slurm, MPI, Kubernetes) need
nothing of this package: `aiorpc.init` finds its place by their environment.
"""
