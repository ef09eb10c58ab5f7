"""The program of batch_ps: a parameter server and its trainers, on any module like torch.distributed.rpc.

Trainers compute gradients on their own images and send them to the server, and get its parameters back in the reply.
Batched, a call leaves its gradients and takes a Future; the call that completes the round makes one optimizer step
with their average and completes the Future for all. Unbatched, each trainer's gradients are a step of their own.

A *backend* is a module with two names: ``rpc`` (any module with the names of torch.distributed.rpc) and
``ParameterServer`` (ServerBase with ``update_and_fetch_model`` decorated by that module).
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from .launch import Place
from .progress import Steps
from .resnet import images, parameter_count, resnet

MOMENTUM = 0.9


@dataclass(frozen=True)
class Settings:
    """What can be chosen for a run. num_steps: of each trainer. batch_size: images of one trainer's step."""

    model: str = "resnet50"
    world_size: int = 4
    num_steps: int = 10
    batch_size: int = 20
    image_size: int = 64
    lr: float = 0.03
    batch: bool = True
    seed: int = 543
    show: bool = True
    timeout: float = 3600.0
    backend_module: str = "aiorpc.examples.batch_ps"


def worker_name(rank: int) -> str:
    return "server" if rank == 0 else f"trainer{rank}"


class ServerBase:
    """Owns the model and its optimizer. Handlers run in several threads at once.

    trainers: how many report in a round.
    """

    def __init__(self, trainers: int, settings: Settings, progress: Steps) -> None:
        torch.manual_seed(settings.seed)
        self._model = resnet(settings.model)
        self.parameters: list[nn.Parameter] = list(self._model.parameters())
        self._optimizer = torch.optim.SGD(self.parameters, lr=settings.lr, momentum=MOMENTUM)
        self._trainers = trainers
        self._lock = threading.Lock()
        self._gradients: dict[int, list[Tensor]] = {}
        self._updated: Future[list[Tensor]] = Future()
        self._progress = progress
        self._losses: list[float] = []

    def get_model(self) -> dict[str, Tensor]:
        """The state of the model, for a trainer that begins."""
        with self._lock:
            return {name: value.clone() for name, value in self._model.state_dict().items()}

    def update_and_fetch_model(self, trainer: int, gradients: list[Tensor], loss: float) -> Future[list[Tensor]]:
        """The parameters after the step that averages the gradients of all trainers of this round."""
        with self._lock:
            future = self._updated
            self._gradients[trainer] = gradients
            self._note(loss)
            if len(self._gradients) == self._trainers:
                # Added in the trainers' order, not in order of arrival: a seed gives the same run again.
                self._step([self._gradients[each] for each in sorted(self._gradients)])
                self._gradients = {}
                self._updated = Future()
                # The next step waits for all trainers, and they wait for this reply: no copy is needed.
                future.set_result([each.detach() for each in self.parameters])
        return future

    def update_alone(self, trainer: int, gradients: list[Tensor], loss: float) -> list[Tensor]:
        """The parameters after a step with the gradients of this trainer only."""
        with self._lock:
            self._note(loss)
            # Its share of a whole step: the same number of images moves the model as far as in batches.
            self._step([[each / self._trainers for each in gradients]])
            # Copies, because another trainer's step may change the parameters while this reply is sent.
            return [each.detach().clone() for each in self.parameters]

    def _step(self, rounds: Sequence[list[Tensor]]) -> None:
        for parameter, *gradients in zip(self.parameters, *rounds, strict=True):
            parameter.grad = torch.stack(gradients).mean(dim=0) if len(gradients) > 1 else gradients[0]
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _note(self, loss: float) -> None:
        self._losses.append(loss)
        if len(self._losses) % self._trainers == 0:
            step = len(self._losses) // self._trainers
            self._progress.done(f"step {step:3d}   loss {self.step_losses()[-1]:7.4f}")

    def step_losses(self) -> list[float]:
        """For each step, the mean loss of the trainers (unbatched: of as many updates)."""
        size = self._trainers
        return [sum(self._losses[i : i + size]) / size for i in range(0, len(self._losses), size)]

    def parameter_count(self) -> int:
        return parameter_count(self.parameters)


def run_trainer(server: Any, trainer: int, settings: Settings) -> None:
    """The work of one trainer, called on its worker by the server. server: RRef of the server."""
    torch.manual_seed(settings.seed + trainer)
    model = resnet(settings.model)
    model.load_state_dict(server.rpc_sync().get_model())
    parameters = list(model.parameters())
    # A step of the slowest trainer bounds the wait; the launcher, or a lost peer, ends it when one dies.
    proxy = server.rpc_sync(timeout=0)
    update = proxy.update_and_fetch_model if settings.batch else proxy.update_alone
    batches = images(settings.seed, trainer, settings.batch_size, settings.image_size)
    for _ in range(settings.num_steps):
        pictures, labels = next(batches)
        loss = torch.nn.functional.cross_entropy(model(pictures), labels)
        gradients = list(torch.autograd.grad(loss, parameters))
        _copy_into(parameters, update(trainer, gradients, loss.item()))


@torch.no_grad()
def _copy_into(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def run_server(backend: Any, place: Place, settings: Settings) -> dict[str, Any]:
    """Make the server, let all trainers work, and return the result."""
    rpc, count = backend.rpc, place.world_size - 1
    with Steps("steps", settings.num_steps, show=settings.show) as progress:
        server = backend.ParameterServer(count, settings, progress)
        reference = rpc.RRef(server)
        started = time.perf_counter()
        futures = [
            rpc.rpc_async(worker_name(rank), run_trainer, args=(reference, rank, settings), timeout=0)
            for rank in range(1, place.world_size)
        ]
        torch.futures.wait_all(futures)
        seconds = time.perf_counter() - started
    losses = server.step_losses()
    samples = count * settings.num_steps * settings.batch_size
    return {
        "program": "batch_ps",
        **asdict(settings),
        "world_size": place.world_size,
        "trainers": count,
        "parameters": server.parameter_count(),
        "seconds": seconds,
        "samples_per_s": samples / seconds,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "losses": losses,
    }


def role(place: Place, settings: Settings) -> dict[str, object] | None:
    """One process of the run: rank 0 is the server and directs the others."""
    backend = importlib.import_module(settings.backend_module)
    backend.rpc.init_rpc(worker_name(place.rank), rank=place.rank, world_size=place.world_size)
    result = run_server(backend, place, settings) if place.rank == 0 else None
    backend.rpc.shutdown()
    return result
