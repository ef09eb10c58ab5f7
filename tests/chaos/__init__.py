"""Groups of workers under faults at random moments, with a mixed load: see `__main__`."""
