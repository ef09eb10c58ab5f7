"""Benchmarks of aiorpc against torch.distributed.rpc, alternating in one run: ``python -m bench``.

Both sides run the same functions on the same machine with their default options; every figure is the median of the
rounds with its minimum and maximum, and every ratio is taken within a round before its median is.

    stats.py        rows of figures, their spreads, ratios and targets (pure)
    functions.py    what the servers run
    clients.py      what a client measures, blocking;  awaited.py: the same with ``await`` (aiorpc only)
    bulk_clients.py what it measures of large tensors;  ticker.py: how late a loop is
    gradient_clients.py    of gradients across workers
    rank.py         one worker process: joins, then obeys its parent
    cohort.py       the worker processes of one side, started from a fork server
    stage.py        the cohorts that are up, and the loop of rounds
    latency.py, throughput.py, bulk.py, scaling.py, idle.py, memory.py, training.py, gradients.py    the measurements
    torch_examples.py      what training.py runs on torch.distributed.rpc
    dropin.py       one more, of a whole program: dropin_program.py
    counting.py     one more, of aiorpc alone: how many Python functions an operation runs;  count_clients.py: in the
                    client;  counter.py: counts them
    messages.py     and how many messages a training step sends;  message_clients.py: at both ends
    groups.py, publishing.py, queues.py   calls to many, weights for many readers, and queues, the latter two also
                    against Ray: ray_side.py runs ray_program.py
    publishing_hosts.py    weights for readers of several hosts;  hosts.py: these are network namespaces
    suite.py        their list;  report.py, picture.py, hardware.py: what comes out
    machine.py      how fast the machine is;  merge.py: the table of figures out of several runs
"""
