"""Every example on four hosts, by torchrun and by Slurm: one process on each host, or on the first of them if it takes
fewer.

The hosts are those of `hosts.py`: each has a network, a host name and process ids of its own, and a link of 1 Gbit/s.
Links have no delay: the kernel on which these tests were written has no netem, so faults that only slow
answers bring about are not found here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from aiorpc.examples import pipeline, rnn
from aiorpc.examples._shared import ps, rl
from aiorpc.examples._shared.policy import CartPole
from aiorpc.examples._shared.progress import Steps
from aiorpc.examples._shared.resnet import images, resnet
from tests.examples import test_pipeline, test_rnn

from .running import running
from .slurm import Slurm

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
SECRET = "the secret of these tests alone"
LIMIT = 90.0  # seconds for a run that takes about five
#: In lines about progress, in this order what an example's `numbers` computes.
NUMBER = re.compile(r"^\w.*? (?:loss|reward|perplexity) +([\d.]+) ?.*$")


# --- what one process computes ----------------------------------------------------------------------------------------


def rewards_of_batch_rl() -> list[float]:
    """Of two episodes of 30 steps, of three observers."""
    seed, core = rl.Settings().seed, rl.AgentCore(3, rl.Settings().seed)
    games = [CartPole(seed + rank) for rank in (1, 2, 3)]
    rewards = []
    for _ in range(2):
        for game in games:
            game.start()
        for _ in range(30):
            for game, action in zip(
                games, core.act_together({i: each.state for i, each in enumerate(games)}), strict=True
            ):
                game.step(action)
        rewards.append(core.learn([game.finish() for game in games]))
    return rewards


def losses_of_batch_ps() -> list[float]:
    """Of two steps of three trainers."""
    given = ps.Settings(model="resnet18", image_size=16, batch_size=4, num_steps=2)
    server = ps.ServerBase(3, given, Steps("steps", given.num_steps, show=False))
    model = resnet(given.model).train()
    readers = [images(given.seed, trainer, given.batch_size, given.image_size) for trainer in (1, 2, 3)]
    for _ in range(given.num_steps):
        before = server.get_model()
        for trainer, reader in enumerate(readers):
            model.load_state_dict(before)
            pictures, labels = next(reader)
            loss = torch.nn.functional.cross_entropy(model(pictures), labels)
            server.update_and_fetch_model(
                trainer, list(torch.autograd.grad(loss, list(model.parameters()))), loss.item()
            )
    return server.step_losses()


def losses_of_pipeline() -> list[float]:
    """Of two steps with whole batches."""
    return test_pipeline.losses_in_one_process(pipeline.Settings(num_steps=2, batch_size=6, width=8, depth=1))


def perplexities_of_rnn() -> list[float]:
    """Of two epochs of eight steps."""
    losses = test_rnn.losses_in_one_process(rnn.Settings(epochs=2, hidden=32))
    return [rnn.perplexity(losses[:8]), rnn.perplexity(losses[8:])]


# --- the examples -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """How an example is run, and what it says.

    hosts: how many it takes. spoken: patterns, each for one line. numbers: computes those of its first lines. received:
    bytes that come over the link of the first host, at least. tries: how often its processes are started, as one is
    killed.
    """

    hosts: int
    options: str
    spoken: tuple[str, ...]
    numbers: Callable[[], Sequence[float]] = list
    received: int = 0
    tries: int = 1


EXAMPLES = {
    "actor_learner": Example(
        4,
        "--games 2 --steps 32 --updates 3",
        (
            r"3 actors: not solved, 3 updates, \d+ games, 768 steps, .* steps/s; reward .* -> .*; weights .*",
        ),
    ),
    "batch_ps": Example(
        4,
        "--model resnet18 --image-size 16 --batch-size 4 --num-steps 2",
        (
            r"step   1   loss +[\d.]+",
            r"step   2   loss +[\d.]+",
            r"resnet18 \(11\.2 M parameters\), 3 trainers, batched: .* samples/s; loss .* -> .*",
        ),
        losses_of_batch_ps,
        received=2 * 3 * 44_000_000,  # gradients of each step and trainer
    ),
    "batch_rl": Example(
        4,
        "--num-episode 2 --num-steps 30",
        (
            r"episode   1   reward +[\d.]+ .*",
            r"episode   2   reward +[\d.]+ .*",
            r"3 observers, batched: 180 steps in .* steps/s; reward .* -> .*",
        ),
        rewards_of_batch_rl,
    ),
    "comeback": Example(
        2,
        "--steps 12 --kill-at 4 --checkpoint LAUNCHER.pt",
        (
            r"the server goes on after step 4",
            r"12 steps, the last in .* process; the error is 0\.00\d\d",
        ),
        tries=2,
    ),
    "cuda_rpc": Example(
        2,
        "--rounds 3 --batch 40 --size 50",
        (
            r"two shards of 50 x 50, 40 rows, 3 rounds, forward and backward",
            r"no CUDA device: both shards are on the CPU, and there is nothing to compare with",
            r"CPU RPC: \d+\.\d{4} s \(forward alone: \d+\.\d{4} s\)",
        ),
    ),
    "parameter_server": Example(
        4,
        "--num-steps 6 --batch-size 4 --check-every 3",
        (
            r"    9 steps   loss +\d+\.\d{3}   accuracy +\d+\.\d% .*",
            r"   18 steps   loss +\d+\.\d{3}   accuracy +\d+\.\d% .*",
            r"3 trainers, 18 steps in .* pictures/s; accuracy .* -> .*",
        ),
    ),
    "pipeline": Example(
        3,
        "--micro 3 --num-steps 2 --batch-size 6 --width 8 --depth 1",
        (
            r"micro-batches  3   step   1   loss +[\d.]+ .*",
            r"micro-batches  3   step   2   loss +[\d.]+ .*",
            r" 3 micro-batches: .* for a batch of 6 .*; loss .* -> .*",
        ),
        losses_of_pipeline,
    ),
    "rnn": Example(
        3,
        "--epochs 2 --hidden 32 --sample 20",
        (
            r"epoch   1   perplexity +[\d.]+ .*",
            r"epoch   2   perplexity +[\d.]+ .*",
            r"2,885 letters, 53 different ones: 16 steps in .*",
            r"it writes: Alice .*",
        ),
        perplexities_of_rnn,
    ),
}  # fmt: skip


# --- the launchers ----------------------------------------------------------------------------------------------------

PORTS = itertools.count(29500)


def by_torchrun(slurm: Slurm, hosts: int, tries: int, program: str) -> str:
    """An agent on each host, started by hand; what all say. It starts all processes again if one fails."""
    command = (
        f"torchrun --nnodes {hosts} --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint n1:{next(PORTS)} "
        f"--max-restarts {tries - 1} {program}"
    )
    machines = [slurm.hosts[name] for name in slurm.nodes[:hosts]]
    with running(command, machines, slurm.folder, AIORPC_SECRET=SECRET) as run:
        return run.wait()


JOB = """#!/bin/bash
#SBATCH --nodes {hosts}
#SBATCH --ntasks-per-node 1
#SBATCH --output job-%j.log
export AIORPC_SECRET=$(head -c 32 /dev/urandom | base64)
srun --kill-on-bad-exit=0 bash -c 'for try in $(seq {tries}); do python {program} && exit; done; exit 1'
"""


def by_slurm(slurm: Slurm, hosts: int, tries: int, program: str) -> str:
    """A task on each node, which starts its process again if that fails; what all say."""
    return slurm.submit(JOB.format(hosts=hosts, tries=tries, program=program)).wait(LIMIT)


LAUNCHERS = {"torchrun": by_torchrun, "slurm": by_slurm}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(slurm: Slurm, name: str, launcher: str) -> None:
    """It finds its place on each host, computes what one process computes, and only rank 0 speaks."""
    example = EXAMPLES[name]
    first = slurm.hosts["n1"].host
    before = first.received()
    program = f"-m aiorpc.examples.{name} {example.options.replace('LAUNCHER', launcher)}"
    said = LAUNCHERS[launcher](slurm, example.hosts, example.tries, program)
    assert first.received() - before > example.received
    lines = [[line for line in said.splitlines() if re.fullmatch(pattern, line)] for pattern in example.spoken]
    assert [len(each) for each in lines] == [1] * len(lines), said
    with torch.random.fork_rng(devices=[]):
        expected = example.numbers()
    found = [number for [line] in lines for number in NUMBER.findall(line)][: len(expected)]
    for text, number in zip(found, expected, strict=True):
        last = 10.0 ** -len(text.partition(".")[2])  # the last digit may be rounded in another way
        assert float(text) == pytest.approx(number, rel=1e-3, abs=last), (said, expected)
