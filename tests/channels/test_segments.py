"""Mapped memory and forks: a child reads what it had, writes for itself alone, and keeps no descriptor."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import numpy
import torch

from aiorpc.channels.segments import HEADER, Mapping, OwnedDescriptor, create_segment, map_private
from aiorpc.channels.space import MIB, PAGE


def mapped(count: int) -> list[Mapping]:
    """So many mappings of one file of sevens."""
    segment = create_segment(0, MIB)
    segment.mapping.array[:] = 7
    mappings = [segment.mapping, *(Mapping(segment.fd, segment.size) for _ in range(count - 1))]
    os.close(segment.fd)
    return mappings


def sevens(mapping: Mapping) -> bool:
    """Whether nobody has written anything else there."""
    return bool((mapping.array == 7).all())


def in_child(body: Callable[[], bool]) -> int:
    """Run this in a forked child; the status with which that ends: 0 if the body returned True."""
    pid = os.fork()
    if pid == 0:
        status = 3
        signal.alarm(20)
        try:
            status = int(not body())
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def descriptors() -> int:
    """How many this process has of such files."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += "aiorpc" in os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the one that listed the folder
            continue
    return found


def test_a_descriptor_is_closed_once_by_who_closes_it_or_with_the_last_who_has_it() -> None:
    """Its number may belong to another file by then, which stays open."""
    held = descriptors()
    segment = create_segment(0, MIB)
    owned, dropped = OwnedDescriptor(segment.fd), OwnedDescriptor(os.dup(segment.fd))
    del segment, dropped  # the mapping has one of its own
    assert descriptors() == held + 1
    number = owned.fd
    owned.close()
    other = os.open("/dev/null", os.O_RDONLY)
    assert (other, descriptors()) == (number, held)
    owned.close()
    del owned
    os.close(other)  # raises if it was closed


def test_child_writes_for_itself_alone() -> None:
    """It reads what was there and what it has written itself; the parent's bytes stay, in all mappings of the file."""
    first, other = mapped(2)

    def body() -> bool:
        as_it_was = sevens(first) and sevens(other)
        first.array[:] = 0
        return as_it_was and not first.array.any() and sevens(other)

    assert in_child(body) == 0
    assert sevens(first) and sevens(other)


def test_child_of_a_child_writes_for_itself_alone() -> None:
    """The first child sees nothing of what the second one writes."""
    (mapping,) = mapped(1)

    def inner() -> bool:
        mapping.array[:] = 0
        return True

    def body() -> bool:
        mapping.array[:] = 8
        return in_child(inner) == 0 and bool((mapping.array == 8).all())

    assert in_child(body) == 0
    assert sevens(mapping)


def test_view_that_outlives_its_mapping_is_private_in_a_child() -> None:
    """A tensor over the memory is all that is left of it, as after the end of its worker."""
    tensor = torch.from_numpy(numpy.frombuffer(mapped(1)[0].memory, numpy.uint8))

    def body() -> bool:
        array = tensor.numpy()  # not by torch, whose threads are not there in a child
        as_it_was = bool((array == 7).all())
        array[:] = 0
        return as_it_was and not array.any()

    assert in_child(body) == 0
    assert bool((tensor == 7).all())


def test_what_the_parent_shares_stays_shared() -> None:
    """A fork changes nothing between the parent and others."""
    first, other = mapped(2)
    assert in_child(lambda: True) == 0
    first.array[0] = 9
    assert other.array[0] == 9


def test_child_keeps_no_descriptor_of_its_own() -> None:
    """That by which it maps the memory anew is closed then; the parent's live as long as the memory."""
    before = descriptors()
    mappings = mapped(1)
    there = descriptors()
    assert there > before
    assert in_child(lambda: descriptors() < there) == 0
    assert descriptors() == there
    mappings.clear()
    assert descriptors() == before


def test_private_blocks_take_no_descriptors() -> None:
    """A process may have a thousand of them from each other one, and often no more than a thousand descriptors."""
    (mapping,) = mapped(1)
    before = descriptors()
    blocks = [map_private(mapping.memory.file.fd, HEADER + number * PAGE, PAGE) for number in range(50)]
    assert descriptors() == before
    blocks[0][:] = 8
    assert sevens(mapping) and (blocks[1] == 7).all() and (blocks[0] == 8).all()
    address = blocks[0].ctypes.data
    assert is_mapped(address)
    del blocks
    assert not is_mapped(address)


def is_mapped(address: int) -> bool:
    """Whether there is a file of ours at that address."""
    with open("/proc/self/maps", encoding="utf-8") as lines:
        for line in lines:
            start, _, end = line.split()[0].partition("-")
            if int(start, 16) <= address < int(end, 16):
                return "aiorpc" in line
    return False
