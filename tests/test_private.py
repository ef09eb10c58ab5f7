"""Which files with secrets are taken: by mode, owner and group."""

from __future__ import annotations

import os
from unittest import mock

import pytest

from aiorpc.private import exposure

USER, GROUP, OTHER = 1000, 2000, 3000


def status(mode: int, owner: int, group: int) -> os.stat_result:
    return os.stat_result((0o100000 | mode, 0, 0, 1, owner, group, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("mode", "owner", "group", "taken"),
    [
        (0o600, USER, GROUP, True),
        (0o400, 0, 0, True),
        (0o440, 0, GROUP, True),  # as Kubernetes mounts it for a pod with fsGroup
        (0o640, 0, GROUP, True),
        (0o440, 0, OTHER, False),  # a group that others are in
        (0o660, 0, GROUP, False),
        (0o444, 0, GROUP, False),
        (0o440, USER, GROUP, False),  # root alone decides who is in a group with it
        (0o600, OTHER, GROUP, False),
    ],
)
def test_a_secret_is_for_this_process_alone(mode: int, owner: int, group: int, taken: bool) -> None:
    """Of this user or root, with nothing for others; root's may be read by a group of this process."""
    with mock.patch.multiple(os, geteuid=lambda: USER, getegid=lambda: USER, getgroups=lambda: [GROUP]):
        said = exposure(status(mode, owner, group))
    if taken:
        assert said is None
    else:
        assert said is not None
        assert f"(mode {mode:04o}, owner {owner}, group {group})" in said and "0640 or 0440 of root" in said
