"""torchrl's RPC collector and remote replay buffer on aiorpc, by one import in front of torchrl's own:

    import aiorpc.compat.torchrl
    from torchrl.collectors.distributed import RPCCollector

It is `aiorpc.compat.torch.install` as an import, for this process and the children it starts with ``multiprocessing``.
RpcUsageError if torchrl's RPC modules were imported before: they have taken torch's names already.
"""

from __future__ import annotations

import sys

from ..errors import RpcUsageError
from .torch import install, installed

__all__: list[str] = []

_THEIRS = ("torchrl.collectors.distributed.rpc", "torchrl.weight_update._rpc")


def _install() -> None:
    if installed():
        return
    early = [name for name in _THEIRS if name in sys.modules]
    if early:
        raise RpcUsageError(f"import aiorpc.compat.torchrl before torchrl: {', '.join(early)} is there already")
    install()


_install()
