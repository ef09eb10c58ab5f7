"""Published values between real processes: one copy for all, and what becomes of it when one of them is killed."""

from __future__ import annotations

import gc
import signal
from pathlib import Path
from typing import Any

import pytest

import aiorpc as rpc
from tests.limits import busy
from tests.runtime.test_publishing import number_of, weights

from . import bodies
from .test_scripts import HEADER, run_ranks
from .workers import group, until

LARGE = 1 << 21  # floats: 8 MiB
_kept: list[Any] = []


def subscribe() -> None:
    """Subscribe on that worker; `read` takes versions."""
    _kept.append(rpc.subscribe("policy", timeout=20))


async def read() -> tuple[int, float, str]:
    """The next version of the first subscription, which is held until the process ends or `let_go`."""
    got = await anext(_kept[0])
    _kept.append(got.value)
    return got.version, number_of(got.value), got.publisher.name


async def take() -> int:
    """The same, without a look at the value."""
    got: rpc.types.PublishedVersion = await anext(_kept[0])
    _kept.append(got.value)
    return got.version


def let_go() -> None:
    """Drop what was read."""
    del _kept[1:]
    gc.collect()


def write(number: float) -> None:
    """Change what was read last."""
    _kept[-1]["w"].fill_(number)


async def publish(number: float, size: int = LARGE) -> int:
    """Publish on that worker."""
    return (await rpc.publish("policy", weights(number, size))).version


def own_memory() -> int:
    """Bytes of memory of that process that no other one has, or of files."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as lines:
        fields = dict(line.split(":", 1) for line in lines if "kB" in line)
    return 1024 * (int(fields["Private_Dirty"].split()[0]) + int(fields["Private_Clean"].split()[0]))


def total() -> float:
    """The sum of what was read last, which takes no memory."""
    return float(_kept[-1]["w"].sum())


async def test_readers_share_one_copy_and_may_write_to_it() -> None:
    """Two processes read the same memory: neither has a copy of its own until it writes."""
    async with group(3) as (worker, _):
        readers = ("w1", "w2")
        for name in readers:
            await rpc.call(name, subscribe)
        for number in (1, 2):
            last = await worker.publish("policy", weights(number, LARGE))
            assert (await last.delivered()).reached
            await until(lambda: worker._node.memory.slots.used == 1)  # what was written to the one before is given back
            before = [await rpc.call(name, own_memory) for name in readers]
            for name in readers:
                assert (await rpc.call(name, take)) == number
                assert await rpc.call(name, total) == number * LARGE
            size = 4 * LARGE
            grown = [await rpc.call(name, own_memory) - least for name, least in zip(readers, before, strict=True)]
            assert max(grown) < size / 4
            await rpc.call("w1", write, -1.0)
            assert await rpc.call("w1", own_memory) - before[0] > size * 0.9
            assert await rpc.call("w1", total) == -LARGE
            assert await rpc.call("w2", total) == number * LARGE
            for name in readers:
                await rpc.call(name, let_go)
        await until(lambda: worker._node.memory.slots.used == 1)


async def test_what_a_killed_reader_held_is_used_again() -> None:
    """Its slots come back once its process is gone; nobody waits for it meanwhile."""
    async with group(3, ended=("w1",)) as (worker, children):
        for name in ("w1", "w2"):
            await rpc.call(name, subscribe)
        for number in (1, 2, 3):
            last = await worker.publish("policy", weights(number))
            assert (await last.delivered()).reached
            await rpc.call("w1", read)
            await rpc.call("w2", read)
            await rpc.call("w2", let_go)
        assert worker._node.memory.slots.used == 3
        waiting = (await worker.publish("policy", weights(4))).delivered(quorum=3, timeout=20)
        children["w1"].kill()
        last = await worker.publish("policy", weights(5))
        delivery = await last.delivered()
        assert [info.name for info in delivery.has] == ["w2"]
        await until(lambda: worker._node.memory.slots.used == 1)
        waiting.cancel()


async def test_a_stopped_reader_holds_up_nobody() -> None:
    """It is named as missing, and goes on with the newest version when it runs again."""
    async with group(3) as (worker, children):
        for name in ("w1", "w2"):
            await rpc.call(name, subscribe)
        first = await worker.publish("policy", weights(1))
        assert (await first.delivered()).reached
        await children["w1"].stop()
        try:
            for number in range(2, 22):
                last = await worker.publish("policy", weights(number))
                assert (await last.delivered(quorum=1)).reached
            delivery = await last.delivered(timeout=0.05)
            assert not delivery.reached and [info.name for info in delivery.missing] == ["w1"]
            assert len(worker._node.memory.slots.numbers()) <= 10
        finally:
            children["w1"].kill(signal.SIGCONT)
        assert (await last.delivered()).reached
        assert await rpc.call("w1", read) == (21, 21, "w0")


async def test_another_worker_goes_on_with_the_name_of_a_killed_publisher() -> None:
    """What its readers have stays readable; versions go on where they were."""
    async with group(3, ended=("w1",)) as (worker, children):
        versions = worker.subscribe("policy", timeout=20)
        for number in (1, 2, 3):
            assert await rpc.call("w1", publish, number) == number
        got = await anext(versions)
        while got.version < 3:
            got = await anext(versions)
        with pytest.raises(rpc.RpcUsageError, match="published by worker 'w1'"):
            await worker.publish("policy", weights(4))
        with pytest.raises(rpc.RpcUsageError, match="published by worker 'w1'"):
            await rpc.call("w2", publish, 4)
        children["w1"].kill()
        await until(lambda: "w1" not in {info.name for info in worker.worker_infos()})
        assert number_of(got.value) == 3
        await rpc.call("w2", bodies.pid)

        async def taken_over() -> bool:
            try:
                return bool(await rpc.call("w2", publish, 4) > 3)
            except rpc.RpcUsageError:  # it has not heard of the loss yet
                return False

        await until(taken_over)
        got = await anext(versions)
        assert got.version > 3 and number_of(got.value) == 4 and got.publisher.name == "w2"
        versions.close()


async def late(name: str) -> tuple[int, float, str]:
    """Handler: what somebody gets who subscribes only now."""
    async with rpc.subscribe(name, timeout=20) as versions:
        got = await anext(versions)
        return got.version, number_of(got.value), got.publisher.name


async def test_a_late_subscriber_gets_what_a_killed_publisher_has_left() -> None:
    """Readers hand the last whole version on, as it was published, whatever they have written to theirs."""
    async with group(4, ended=("w1",)) as (worker, children):
        await rpc.call("w2", subscribe)
        for number in (1, 2, 3):
            await rpc.call("w1", publish, number)
        await until(lambda: read_until(3))
        await rpc.call("w2", write, 9.0)
        children["w1"].kill()
        await until(lambda: "w1" not in {info.name for info in worker.worker_infos()})
        assert await rpc.call("w3", late, "policy") == (3, 3, "w1")
        assert await late("policy") == (3, 3, "w1")


async def read_until(version: int) -> bool:
    """Whether the subscription of w2 has come so far."""
    return bool(await rpc.call("w2", take) == version)


SCRIPT = f"""{HEADER}
import torch

if PUBLISHES:
    class Policy:
        scale = torch.full((20_000,), 2.0)  # it travels with the class, where that goes by value

        def __init__(self):
            self.weights = torch.full((20_000,), 40.0)

        def total(self):
            return int(self.weights.mean() + self.scale.mean())

if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"w{{rank}}")
    if rank == 0:
        rpc.publish("policy", Policy()).wait()
    else:
        value = next(rpc.subscribe("policy", timeout={60 * busy()})).value
        assert type(value).__name__ == "Policy" and value.total() == 42
        assert PUBLISHES == (type(value) is globals().get("Policy"))
    rpc.shutdown()
"""


@pytest.mark.slow
def test_a_class_of_the_publisher_s_script_can_be_read_by_all(tmp_path: Path) -> None:
    """By name by who runs the same script, else by value, with the tensors that the class itself has."""
    paths = [tmp_path / "publisher.py", tmp_path / "reader.py"]
    for path, publishes in zip(paths, (True, False), strict=True):
        path.write_text(SCRIPT.replace("PUBLISHES", str(publishes)))
    publisher, reader = paths
    run_ranks([publisher, publisher, reader])
