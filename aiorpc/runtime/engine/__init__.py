"""The base of all parts of a worker: its loop and threads, tasks, blocking steps, its state, its process.

Owns: the loop, the pools of threads, tasks, blocking steps, counters, the state of the worker (`Lifetime`), busy
polling, watching the loop and other processes, and the observers of messages and calls.

Shows: `Engine`, `Lifetime`, `Steps`, `Observer`.

Must not touch: any other package of the runtime: all of them are above it.
"""
