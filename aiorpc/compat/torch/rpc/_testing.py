"""Stands as ``torch.distributed.rpc._testing``, found on the path of the package that stands as its parent.

Importing it registers the backend that injects faults, as with torch. It is loaded under torch's name: imports are
absolute.
"""

from __future__ import annotations

from aiorpc.compat.torch.faulty import FaultyTensorPipeAgent, FaultyTensorPipeRpcBackendOptions, register

__all__ = ["FaultyTensorPipeAgent", "FaultyTensorPipeRpcBackendOptions", "is_available"]


def is_available() -> bool:
    """Always."""
    return True


register()
