"""torch's agent of a process: its worker, with the names that programs use.

`process` holds the agent of this process, as torch's C++ does; a program's own backend may set another one.
"""

from __future__ import annotations

import math
import os

import torch

from .... import sync
from ....errors import RpcUsageError
from ....options import RpcBackendOptions
from ....protocol.identity import WorkerInfo
from ....runtime.group.group import ShutdownReport
from ....worker import Worker


class RpcAgent:
    """The base of all agents, for ``isinstance``."""


class TensorPipeAgent(RpcAgent):
    """The agent of a worker of aiorpc. Programs use this name; there is no TensorPipe behind."""

    def __init__(self, worker: Worker, store: object = None) -> None:
        self.worker = worker
        self.store = store  # torch's store from the program; None if it gave an address
        self.report: ShutdownReport | None = None
        self.gil_profiling = False
        self._process = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this is a forked child, which may start a worker of its own."""
        return os.getpid() != self._process

    # --- the group ----------------------------------------------------------------------------------------------------

    @property
    def is_static_group(self) -> bool:
        """Whether the group has a fixed size."""
        return not self.worker.dynamic

    def get_worker_info(self, worker_name: str | int | None = None) -> WorkerInfo:
        """Name and id of this worker, or of another one by its name or id. RuntimeError if there is none."""
        if isinstance(worker_name, str) or worker_name is None:
            return self.worker.get_worker_info(worker_name)
        self.worker._check_open()
        peer = self.worker._node.peers.find(worker_name)
        return self.worker._node.peers.info(self.worker._node.peers.id_of(peer))

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Of all members."""
        return self.worker.worker_infos()

    def _get_device_map(self, to: WorkerInfo) -> dict[torch.device, torch.device]:
        """The device map of this worker to another one."""
        return dict(self.worker._node.accelerators.claims.maps.get(to.name, {}))

    def _get_backend_options(self) -> RpcBackendOptions:
        """The options, as they were at init."""
        return self.worker.options

    # --- figures ------------------------------------------------------------------------------------------------------

    def get_debug_info(self) -> dict[str, str]:
        """Figures of this worker, as text."""
        figures = self.worker.statistics()
        found = {
            "agent.thread_pool_size": self.worker.options.num_worker_threads,
            "agent.num_idle_threads": figures.threads_idle,
            "agent.num_pending_requests": figures.calls_running,
            "agent.client_active_calls": figures.calls_pending,
            "agent.server_active_calls": figures.calls_running,
            "agent.server_active_async_calls": max(0, figures.calls_running - figures.threads + figures.threads_idle),
        }
        if self.gil_profiling:  # if the loop is not computing, it waits for the interpreter lock
            found["agent.gil_average_wait_time_us"] = math.ceil(1e6 * figures.loop_lag_mean)
        return {name: str(value) for name, value in found.items()}

    get_metrics = get_debug_info

    # --- leaving ------------------------------------------------------------------------------------------------------

    def join(self, shutdown: bool = False, timeout: float = 0.0) -> None:
        """Serve until all members' work is over. shutdown: leave then. timeout: seconds, 0 for no limit."""
        if not shutdown:
            raise RpcUsageError("join() without shutdown=True: aiorpc has no use for it; use api._wait_all_workers()")
        self.report = sync.shutdown(True, timeout)

    def sync(self) -> None:
        """Nothing to do: messages are sent at once."""

    def shutdown(self) -> None:
        """Leave at once, if that has not happened."""
        if self.report is None:
            self.report = sync.shutdown(False)


class Process:
    """The state of this process."""

    def __init__(self) -> None:
        self.agent: object = None


process: Process = Process()
