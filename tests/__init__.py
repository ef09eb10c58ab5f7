"""Tests of aiorpc; folders mirror the package."""
