"""The commands of ``python -m aiorpc``, one module each."""
