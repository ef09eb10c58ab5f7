"""Workers that run other versions of Python, torch or aiorpc: told once, and what depends on them is not sent."""

from __future__ import annotations

import logging
import operator
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import torch
from torch.distributed import HashStore

import aiorpc
from aiorpc import Worker
from aiorpc.errors import SerializationError
from aiorpc.protocol.identity import WorkerRecord
from aiorpc.runtime import lifecycle
from aiorpc.runtime.engine.host import versions
from aiorpc.runtime.group.versions import VersionNotes
from tests.runtime.waiting import until

RECORD = WorkerRecord("w0", 0, "1", "h", "h", 1, "", "", "", 0, python="3.11.7", torch="2.13.0+cpu", aiorpc="0.1.0")


@pytest.fixture
async def mixed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Worker, Worker]]:
    """A worker, and one that says that it runs Python 3.99."""
    store = HashStore()
    async with aiorpc.init("here", store=store) as here:
        monkeypatch.setattr(lifecycle, "versions", lambda: {**versions(), "python": "3.99.1"})
        async with aiorpc.init("there", store=store) as there:
            yield here, there


async def test_what_depends_on_the_version_of_python_is_refused_before_it_is_sent(
    mixed: tuple[Worker, Worker],
) -> None:
    """Functions and classes by value, as arguments too; calls by name, and tensors, work in both directions."""
    local = type("Local", (), {})
    for caller, callee in (mixed, mixed[::-1]):
        ours, theirs = (caller._node.engine.record.minor, callee._node.engine.record.minor)
        assert await caller.call(callee.name, operator.add, 1, 2) == 3
        assert torch.equal(await caller.call(callee.name, torch.neg, torch.ones(2)), -torch.ones(2))
        if caller is mixed[1]:
            ours = mixed[0]._node.engine.record.minor  # the process is what it is
        for function, argument in ((lambda value: value, 1), (len, [lambda: 1]), (repr, local())):
            with pytest.raises(SerializationError, match=rf"here it is {ours}, there {theirs}"):
                await caller.call(callee.name, function, argument)  # type: ignore[call-overload]


async def test_other_versions_are_told_once_at_joining(
    mixed: tuple[Worker, Worker], caplog: pytest.LogCaptureFixture
) -> None:
    """Each side names both versions and the worker that has the other one."""

    def told_of() -> list[str]:
        lines = [each.getMessage() for each in (*caplog.get_records("setup"), *caplog.get_records("call"))]
        return [line for line in lines if "Python 3.99.1" in line]

    assert await mixed[0].call("there", abs, -1) == 1
    await until(lambda: len(told_of()) == 2)
    told = told_of()
    for own, other in (("here", "there"), ("there", "here")):
        (line,) = (each for each in told if each.startswith(f"worker {own}: '{other}'"))
        assert line.count("Python 3.") == 2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"python": "3.12.1"}, "Python 3.12.1; here it is Python 3.11.7"),
        ({"torch": "2.12.0"}, "torch 2.12.0; here it is torch 2.13.0"),
        ({"aiorpc": ""}, "aiorpc unknown; here it is aiorpc 0.1.0"),
        ({"torch": "2.13.0+cu130", "python": "3.11.9"}, None),
    ],
)
def test_only_versions_that_matter_are_told(
    change: dict[str, str], text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Not another build of torch, nor another patch of Python; ten members with the same one are told once."""
    notes = VersionNotes(RECORD)
    others = [replace(RECORD, name=f"w{at}", id=at, incarnation=f"{at:x}", **change) for at in range(1, 11)]  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "aiorpc"):
        notes.tell([RECORD, *others])
        notes.tell(others)
    assert [text in each.getMessage() for each in caplog.records if text] == ([True] if text else [])
    assert len(caplog.records) == bool(text)
