"""Real launchers: Slurm, Open MPI, torchrun on several hosts. `make testcluster` installs and runs them."""
