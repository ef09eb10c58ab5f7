"""A cluster under a steady mixed load for hours, and whether anything of it grows: `python -m bench.soak`."""
