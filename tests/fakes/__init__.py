"""Devices that do not exist, for tests of what needs them: see `cuda`."""
