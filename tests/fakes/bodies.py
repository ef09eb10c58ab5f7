"""What the other process of `test_processes` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..processes.workers import Link, Place
from .cuda import FakeCuda

SIZE = 4096  # bytes of a message
ROUNDS = 200


def obey(place: Place, link: Link, options: dict[str, Any]) -> list[str]:
    """Call what the test names until it says "end"; its violations.

    An order is a name of `FakeInterprocess` or `FakeCuda`, and arguments. What cannot be sent stays here: the answer is
    a text that stands for it in later orders. An error is answered by its text.
    """
    kept: dict[str, Any] = {}
    with FakeCuda(**options) as fake:
        while (order := link.hear())[0] != "end":
            link.tell(_answer(fake, kept, *order))
    return fake.violations


def _answer(fake: FakeCuda, kept: dict[str, Any], name: str, *args: Any) -> Any:
    args = tuple(kept.get(each, each) if isinstance(each, str) else each for each in args)
    if name == "forget":
        kept.clear()
        return None
    try:
        result = getattr(fake.interprocess if hasattr(fake.interprocess, name) else fake, name)(*args)
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    if result is None or isinstance(result, int | bytes | bool):
        return result
    token = f"kept {len(kept)}"
    kept[token] = result
    return token


def leave_alone(fake: FakeCuda, *_: Any) -> None:
    """For a call that is left out."""


def receive(place: Place, link: Link, left_out: str) -> tuple[int, list[str]]:
    """Take `ROUNDS` messages out of the memory of the test; how many were wrong, and violations."""
    checks = []
    with FakeCuda(seed=2) as fake:
        driver = fake.interprocess
        assert driver is not None
        memory, event = driver.open(0, link.hear()), driver.open_event(0, link.hear())
        wait, record = _chosen(fake, left_out)
        for number in range(ROUNDS):
            link.hear()
            stream = fake.fresh(0)
            with fake.entered([stream]):
                target = fake.empty(SIZE, 0)
                wait(event, stream)
                driver.copy(target.data_ptr(), memory, SIZE, stream)
                record(event, stream)
                checks.append((stream, (fake.tensor(target, 0) == number % 251).all()))
            link.tell(None)
        wrong = sum(not _value(fake, *check) for check in checks)
        driver.close(0, memory)
    return wrong, fake.violations


def send(fake: FakeCuda, memory: int, event: Any, left_out: str, tell: Callable[[], None]) -> None:
    """The other side: each message is written over the last one."""
    driver = fake.interprocess
    assert driver is not None
    wait, record = _chosen(fake, left_out)
    source = fake.tensor(fake.empty(SIZE, 0), 0)
    stream = fake.current(0)
    for number in range(ROUNDS):
        source.fill_(number % 251)
        wait(event, stream)
        driver.copy(memory, fake.carrier(source).data_ptr(), SIZE, stream)
        record(event, stream)
        tell()


def _chosen(fake: FakeCuda, left_out: str) -> tuple[Callable[..., None], Callable[..., None]]:
    driver = fake.interprocess
    assert driver is not None
    return (
        leave_alone if left_out == "wait" else driver.wait,
        leave_alone if left_out == "record" else driver.record,
    )


def _value(fake: FakeCuda, stream: Any, check: torch.Tensor) -> bool:
    with fake.entered([stream]):
        return bool(check)
