"""Tests on real devices: two processes, one GPU or two. Skipped where there is none."""
