"""Seeing what workers do: recordings of all workers of a group on one time axis.

`recording` is what each worker notes, with the handlers that start and fetch it. `profiling` runs torch's profiler
meanwhile. `recorder` asks all workers and aligns their clocks. `timeline` makes the file of it.
"""
