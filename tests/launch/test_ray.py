"""What `aiorpc.launch.ray` refuses before it asks Ray for anything. What Ray does with the rest: tests/cluster."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import pytest

import aiorpc
from aiorpc.launch import ray as on_ray


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"workers": 0}, "workers must be a number of workers >= 1, not 0"),
        ({"workers": True}, "workers must be"),
        ({"name": "actor", "workers": 2}, "must make a name of its own for each worker"),
        ({"name": "driver"}, "none may be 'driver'"),
        ({"name": "actor{number}"}, r"name may have \{rank\} and \{role\} in braces"),
        ({"name": "actor{rank"}, r"name may have \{rank\}"),
        ({"name": "an actor"}, "name"),
        ({"name": 3}, "name may have"),
        ({"role": "no role"}, "a role has"),
        ({"strategy": "NEAR"}, "strategy must be one of PACK, SPREAD"),
        ({"setup": 3}, "setup must be a function without arguments"),
        ({"options": {}}, "options must be an RpcBackendOptions"),
        ({"timeout": 0}, "timeout must be longer than 0 s"),
        ({"timeout": -1}, "timeout must be a number of seconds"),
        ({"num_cpus": 0}, "num_cpus, num_gpus and resources are all 0"),
        ({"lifetime": "detached"}, "lifetime: aiorpc sets this option of Ray's actors itself"),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused(arguments: dict[str, Any], said: str) -> None:
    """By an error that names it."""
    with pytest.raises(aiorpc.RpcUsageError, match=said):
        on_ray.start(**{"workers": 1} | arguments)


def test_names_have_rank_and_role() -> None:
    """In braces, as the pattern says; the role is that of all of them."""
    group = on_ray.start("{role}-{rank}", workers=2, role="actor")
    assert group.names == ["actor-0", "actor-1"]
    assert on_ray.start("learner", workers=1).names == ["learner"]
    with pytest.raises(aiorpc.RpcUsageError, match="has not been started"):
        _ = group.invitation


async def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `async with` and `with`; the module is imported without it."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(aiorpc.RpcUsageError, match=r"pip install 'aiorpc-torch\[ray\]'"):
        async with on_ray.start(workers=1):
            raise AssertionError
    with pytest.raises(aiorpc.RpcUsageError, match=r"pip install 'aiorpc-torch\[ray\]'"), on_ray.start(workers=1):
        raise AssertionError


def test_an_invitation_does_not_show_its_secret() -> None:
    """It can be pickled, as Ray does with arguments."""
    invitation = on_ray.Invitation("tcp://10.0.0.1:29500", b"not to be seen by anybody", aiorpc.RpcBackendOptions())
    copied = pickle.loads(pickle.dumps(invitation))
    assert copied.place == invitation.place and copied._secret == invitation._secret
    assert "seen" not in repr(copied)
