"""A channel of another package, found by its entry point in real processes: real tensors go by it, both ways."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

import pytest
import torch

import aiorpc as rpc
from tests.channels import files_channel

from . import bodies
from .workers import Link, Place, meeting_file, places, processes

CONTEXT = "FilesContext"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder in which the package is installed."""
    return install(tmp_path, f"files_channel_package:{CONTEXT}")


def install(folder: Path, target: str) -> Path:
    """Put the package there, with an entry point that names `target`."""
    package, about = folder / "files_channel_package", folder / "files_channel_package-1.0.dist-info"
    package.mkdir()
    about.mkdir()
    shutil.copy(files_channel.__file__, package / "__init__.py")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: files-channel-package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[aiorpc.channels]\nfiles = {target}\n")
    return folder


def answer(place: Place, link: Link, folder: str) -> None:
    """Serve with that folder on the path; empty: without."""
    sys.path[:0] = [folder] if folder else []
    place.init_rpc()
    rpc.shutdown()


def ask(place: Place, link: Link, folder: str) -> dict[str, tuple[int, int]]:
    """Send tensors to the other worker and back: what went by which channel."""
    sys.path[:0] = [folder] if folder else []
    return asyncio.run(ask_there(place))


async def ask_there(place: Place) -> dict[str, tuple[int, int]]:
    tensors = [torch.arange(size, dtype=torch.float32) for size in (5, 1 << 13, 1 << 16, 1 << 20)]
    async with rpc.init("w0", rank=0, world_size=2, init_method=place.init_method) as worker:
        for tensor in tensors:
            assert torch.equal(await rpc.call("w1", bodies.echo, tensor), tensor)
        back = await rpc.call("w1", bodies.echo, tensors)
        assert all(map(torch.equal, back, tensors))
        return {name: (each.sent, each.received) for name, each in worker.statistics().channels.items()}


def moved(first: str, second: str) -> dict[str, tuple[int, int]]:
    """Of a group of two, with these folders on their paths."""
    with processes() as children, meeting_file() as init_method:
        here, there = places(2, init_method)
        children.start(there, answer, second)
        asked = children.start(here, ask, first).hear()
        children.check_ended()
    return asked  # type: ignore[no-any-return]


def test_tensors_go_by_the_channel_of_another_package(installed: Path) -> None:
    """Both have it: long tensors go by it, both ways, alone and together; short ones do not."""
    by = moved(str(installed), str(installed))
    assert by["files"] == (4, 4)
    assert by["shared memory"] == by["bulk"] == (0, 0) and by["inline"] == (2, 2)


def test_a_channel_that_one_worker_lacks_is_not_used(installed: Path) -> None:
    """It is nothing but a name in its introduction."""
    by = moved(str(installed), "")
    assert by["files"] == (0, 0) and by["shared memory"][0] + by["inline"][0] + by["bulk"][0] == 6
    assert "files" not in moved("", str(installed))


def test_a_channel_that_cannot_be_loaded_is_left_out(tmp_path: Path) -> None:
    """The worker starts without it."""
    folder = str(install(tmp_path, "files_channel_package:Missing"))
    by = moved(folder, folder)
    assert "files" not in by and by["shared memory"][0] + by["inline"][0] + by["bulk"][0] == 6
