"""What ``python -m aiorpc`` can do, a module for each command."""
