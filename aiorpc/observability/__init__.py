"""Seeing a group from inside and outside: reports, stacks, who waits for whom, metrics, traces, one time axis.

In a worker's process `endpoint` answers those who look, in a thread of its own. `reader` asks from outside. `beating`
writes the heartbeat of a worker, `heartbeat` reads it. Modules that the commands of ``python -m aiorpc`` use (`report`,
`reader`, `heartbeat`) import no torch.

`recording` is what each worker notes, with the handlers that start and fetch it. `profiling` runs torch's profiler
meanwhile. `recorder` asks all workers and aligns their clocks. `timeline` makes the file of it.
"""
