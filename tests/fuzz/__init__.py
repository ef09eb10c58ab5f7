"""Fuzzing: what reads bytes of others gets broken ones. `python -m tests.fuzz --help` says how it is run."""
