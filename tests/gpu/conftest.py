"""All tests here need a GPU. Starting two processes takes seconds: they are shared by all tests of one way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ..processes.workers import places
from . import bodies
from .pair import DEVICE_BUFFER, START, VARIANTS, Exchange, Pair, spawned, start_pair


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this folder, and skip it without a device."""
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    missing = pytest.mark.skip(reason="no CUDA device: torch.cuda.is_available() is false")
    available = bool(ours) and torch.cuda.is_available()
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.time_limit(START + 90))
        if not available:
            item.add_marker(missing)


@pytest.fixture(scope="session")
def exchange() -> Exchange:
    """Tried once."""
    with spawned() as children:
        first, second = places(2, "file:///unused")
        exporter, importer = children.start(first, bodies.lend), children.start(second, bodies.borrow)
        offer = exporter.hear(START)
        if isinstance(offer, str):
            return Exchange(offer)
        importer.tell(offer)
        if refusal := importer.hear(START):
            return Exchange(refusal)
        done: list[bool] = []
        for _ in bodies.VALUES:
            for child in (exporter, importer):
                child.tell("go")
                done.append(child.hear(START))
        read = importer.hear(START)
        exporter.tell("it is closed")
        children.check_ended()
        return Exchange("", read, done)


@pytest.fixture(scope="session")
def refusal(exchange: Exchange) -> str:
    """Why two processes cannot share device memory here; empty if they can."""
    return exchange.refusal


@pytest.fixture(scope="package")
def pair(request: pytest.FixtureRequest, refusal: str) -> Iterator[Pair]:
    """The pair of the variant that the test names as its parameter."""
    variant = VARIANTS[request.param]
    way = variant.way or ("staging" if refusal else "ipc")
    if way == "ipc" and refusal:
        pytest.skip(f"device memory cannot be shared between processes here: {refusal}")
    options = {"device_buffer": DEVICE_BUFFER, **variant.options}
    with start_pair(way=way, options=options, env=variant.env) as both:
        yield both
