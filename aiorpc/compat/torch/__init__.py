"""A drop-in for ``torch.distributed.rpc``: old programs run on aiorpc unchanged.

    python -m aiorpc.compat.torch script.py ...          # or: -m module ...; its children, torchrun's too, as well

    import aiorpc.compat.torch
    aiorpc.compat.torch.install()                        # before the program's own imports from torch.distributed.rpc
    import torch.distributed.rpc as rpc                  # aiorpc now

`install` puts modules of this package in place of ``torch.distributed.rpc`` and its submodules,
``torch.distributed.autograd`` and ``torch._C._distributed_rpc``; its own DistributedOptimizer and RemoteModule in place
of torch's; and a ``wait_all`` and a ``collect_all`` that end with the first error in place of those of
``torch.futures``. `aiorpc.Future.then` raises what torch's does, until `uninstall`. Everything else is torch's. The
modules add names and texts that programs know, no logic: workers, calls, references and gradients are aiorpc's.
"""

from __future__ import annotations

from .substitute import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]
