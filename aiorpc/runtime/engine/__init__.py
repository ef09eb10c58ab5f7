"""What every part of a worker runs on: its loop and threads, tasks, blocking steps, its state, its process.

Owns: the loop, the pools of threads, tasks, blocking steps, counters, the state of the worker (`Lifetime`), when
a loop stays awake, watching it and other processes, and the list of observers of messages.

Shows: `Engine`, `Lifetime`, `Steps`, `Observer`.

Must not touch: any other room: everything stands on this one.
"""
