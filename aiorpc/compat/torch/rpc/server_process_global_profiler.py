"""Stands as ``torch.distributed.rpc.server_process_global_profiler``, which aiorpc does not have."""

from __future__ import annotations

from typing import NoReturn

from ....errors import RpcUsageError

__all__: list[str] = []


class _server_process_global_profile:
    """Refuses: aiorpc does not take part in torch's legacy profiler."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __enter__(self) -> NoReturn:
        raise RpcUsageError(
            "aiorpc does not profile other workers for torch's legacy profiler; profile each worker by itself"
        )

    def __exit__(self, *exc_info: object) -> None:
        pass
