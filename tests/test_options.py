"""Options: defaults, what is refused, and that what is read is what was given."""

from __future__ import annotations

import inspect
import math
import pickle
import re
from dataclasses import FrozenInstanceError, fields, replace
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiorpc import Worker
from aiorpc.compat.torch.rpc.options import TensorPipeRpcBackendOptions
from aiorpc.devices import DeviceClaims, check_device_maps
from aiorpc.errors import RpcUsageError
from aiorpc.options import LimitOptions, NetworkOptions, RpcBackendOptions, SecurityOptions, Tls, seconds

CUDA = [torch.device("cuda", index) for index in range(4)]
CPU = torch.device("cpu")


class Unspeakable:
    """What cannot even be shown."""

    def __repr__(self) -> str:
        raise ValueError("no words")


#: What is none of the values of nearly all options.
ODD: dict[str, Any] = {
    "NaN": math.nan,
    "infinity": math.inf,
    "minus infinity": -math.inf,
    "minus one": -1,
    "more than a float holds": 10**400,
    "less than a float holds": -(10**400),
    "more digits than Python writes": 10**5000,
    "a complex number": 1j,
    "bytes": b"x",
    "a text with a null": "a\0b",
    "half of a character": "\ud800",
    "a list in a list": [[]],
    "a list of a list in text": ["unix", ["tcp"]],
    "numbers by numbers": {1: 2},
    "a number by a name": {"a": 5},
    "an iterator": iter(()),
    "a class": int,
    "an object": object(),
    "what cannot be shown": Unspeakable(),
    "a negative duration": timedelta(seconds=-1),
}
#: Those that an option takes all the same: what is no URL is told where it is read, no device by torch's error.
TAKEN = {
    ("init_method", "a text with a null"),
    ("init_method", "half of a character"),
    *(("devices", each) for each in ("bytes", "a list in a list", "a list of a list in text", "an iterator")),
    *(("devices", each) for each in ("numbers by numbers", "a number by a name")),
}


#: The groups by the names that they are given by.
GROUPS: dict[str, type[Any]] = {"limits": LimitOptions, "network": NetworkOptions, "security": SecurityOptions}


def test_defaults_are_those_of_torch() -> None:
    """A minute for a call, sixteen threads, env://: programs that say nothing behave as they did."""
    options = RpcBackendOptions()
    assert (options.rpc_timeout, options.num_worker_threads, options.init_method) == (60.0, 16, "env://")


def test_every_option_is_documented() -> None:
    """The docstring of the class that has an option names it, and no other does."""
    named: list[str] = []
    for kind in (RpcBackendOptions, *GROUPS.values()):
        lines = (inspect.getdoc(kind) or "").splitlines()  # Python 3.13 leaves out the indentation itself
        named += [line.partition(": ")[0] for line in lines if re.match(r"\w+: |\w+, \w+, \w+: ", line)]
    made_from = [", ".join(GROUPS), "serve"]
    assert sorted(named) == sorted([*(field.name for field in fields(RpcBackendOptions)), *made_from])


@pytest.mark.parametrize("name", [field.name for field in fields(RpcBackendOptions)])
def test_every_option_refuses_what_it_cannot_be(name: str) -> None:
    """By its name, when the options are made, and when they were changed since: before anything is opened."""
    for kind, value in ODD.items():
        if (name, kind) in TAKEN:
            continue
        given: dict[str, Any] = {name: value}
        with pytest.raises(RpcUsageError) as caught:
            RpcBackendOptions(**given)
        assert str(caught.value).startswith(name), kind
        assert len(str(caught.value)) < 300, kind
        options = RpcBackendOptions()
        setattr(options, name, value)
        with pytest.raises(RpcUsageError) as again:
            Worker("worker", options=options)
        assert str(again.value).startswith(name), kind


@pytest.mark.parametrize("kind", [RpcBackendOptions, TensorPipeRpcBackendOptions])
def test_what_is_set_and_is_no_option_is_refused(kind: type[RpcBackendOptions]) -> None:
    """With the name that was meant, if one is near; a subclass may have more of them, and what is hidden is its own."""
    options: Any = kind()
    with pytest.raises(RpcUsageError, match=r"no option 'max_quued_bytes'; did you mean 'max_queued_bytes'\?"):
        options.max_quued_bytes = 1
    with pytest.raises(RpcUsageError, match=r"there is no option 'colour'$"):
        options.colour = "red"

    class Painted(kind):  # type: ignore[valid-type,misc]  # a class that is given, of which mypy knows no more
        colour: str

        def __init__(self) -> None:
            super().__init__()
            self.colour = "red"
            self._shade = 1

    options = Painted()
    options.max_queued_bytes = 5
    assert (options.copy().colour, options.copy()._shade, options.copy().max_queued_bytes) == ("red", 1, 5)


#: An option of each group, with a value that is not its default.
OF_GROUPS: list[tuple[str, str, Any]] = [
    ("limits", "max_streams", 5),
    ("limits", "max_call_rate", 2.5),
    ("network", "reconnect_grace", 3.0),
    ("network", "transports", ("tcp",)),
    ("security", "allow", ("a:f",)),
    ("security", "require_secret", True),
]


@pytest.mark.parametrize("kind", [RpcBackendOptions, TensorPipeRpcBackendOptions])
@pytest.mark.parametrize(("group", "name", "value"), OF_GROUPS)
def test_an_option_is_given_in_its_group_or_by_its_name(
    kind: type[RpcBackendOptions], group: str, name: str, value: Any
) -> None:
    """It comes to the same, and is read and set by its name; the others of the group may be given beside it."""
    grouped: dict[str, Any] = {group: GROUPS[group](**{name: value})}
    flat: dict[str, Any] = {name: value}
    options = kind(**grouped, max_queued_calls=7, min_bulk_bytes=9)
    assert options == kind(**flat, max_queued_calls=7, min_bulk_bytes=9)
    assert options.copy() == options == pickle.loads(pickle.dumps(options))
    assert (getattr(options, name), options.max_queued_calls, options.min_bulk_bytes) == (value, 7, 9)
    options.max_queued_calls = 8
    setattr(options, name, getattr(kind(), name))
    assert options == kind(max_queued_calls=8, min_bulk_bytes=9)


@pytest.mark.parametrize(("group", "name", "value"), OF_GROUPS)
def test_an_option_that_is_given_twice_is_refused(group: str, name: str, value: Any) -> None:
    """Both places are named, also where both say the same, or the default."""
    kind = GROUPS[group]
    for inside, outside in ((value, value), (value, getattr(kind(), name)), (getattr(kind(), name), value)):
        given: dict[str, Any] = {group: kind(**{name: inside}), name: outside}
        with pytest.raises(RpcUsageError, match=rf"^{name} is given twice: as {name}=, and in {group}=rpc\."):
            RpcBackendOptions(**given)


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_is_checked_as_it_is_made_and_stays_as_it_is(group: str) -> None:
    """What cannot be is told where it stands; what is made is compared by values, copied with changes, and pickled."""
    kind = GROUPS[group]
    for name in (field.name for field in fields(kind)):
        for odd, value in ODD.items():
            with pytest.raises(RpcUsageError) as caught:
                kind(**{name: value})
            assert str(caught.value).startswith(name), odd
        made = kind()
        with pytest.raises(FrozenInstanceError, match=name):
            setattr(made, name, getattr(made, name))
        assert made == replace(made) == pickle.loads(pickle.dumps(made))


@pytest.mark.parametrize("group", GROUPS)
def test_what_is_no_group_is_refused(group: str) -> None:
    """Another group, a dict, all options; and a group that is set when the options are there."""
    other = GROUPS["security" if group == "limits" else "limits"]()
    wrongs: list[object] = [other, {}, RpcBackendOptions(), 5, False]
    for wrong in wrongs:
        given: dict[str, Any] = {group: wrong}
        with pytest.raises(RpcUsageError, match=rf"^{group} must be rpc\.{GROUPS[group].__name__}\(\.\.\.\) or None"):
            RpcBackendOptions(**given)
    options = RpcBackendOptions()
    with pytest.raises(RpcUsageError, match=f"^{group} is given as options are made; set each"):
        setattr(options, group, GROUPS[group]())
    assert getattr(options, group) is None


@pytest.mark.parametrize("value", [5, "tcp", {"transports": ("tcp",)}, 0, False])
def test_options_are_options(value: Any) -> None:
    """Not a dictionary of them, nor anything else, also not what is taken for nothing."""
    with pytest.raises(RpcUsageError, match="options must be an RpcBackendOptions or None"):
        Worker("worker", options=value)


@pytest.mark.parametrize("value", [5, b"tcp://localhost:1", "file:///a\0b"])
async def test_init_methods_that_are_none_are_refused_before_anything_is_opened(value: Any) -> None:
    """Where they are given to `init`, and not among the options."""
    with pytest.raises(RpcUsageError, match="init_method"):
        await Worker("worker", init_method=value)


def test_what_is_kept_is_more_than_what_is_acknowledged_at_once() -> None:
    """With less, a connection would stand still until the next look."""
    assert RpcBackendOptions(max_unacknowledged_bytes=4 << 20).max_unacknowledged_bytes == 4 << 20
    with pytest.raises(RpcUsageError, match="max_unacknowledged_bytes must be at least 4194304"):
        RpcBackendOptions(max_unacknowledged_bytes=(4 << 20) - 1)


@given(st.floats(0, 1e9) | st.integers(0, 1 << 40))
def test_durations_in_seconds_or_as_timedelta(value: float) -> None:
    """Numbers and timedeltas both come out as seconds."""
    assert seconds(value, "x") == value
    assert seconds(timedelta(seconds=90), "x") == 90.0
    assert type(seconds(value, "x")) is float


@pytest.mark.parametrize("value", [np.float32(1.5), np.int64(2), Fraction(1, 2)])
def test_durations_are_numbers_of_any_kind(value: Any) -> None:
    """What was computed with numpy need not be converted."""
    assert seconds(value, "x") == float(value)
    assert type(seconds(value, "x")) is float
    assert RpcBackendOptions(rpc_timeout=value).rpc_timeout == float(value)
    with pytest.raises(RpcUsageError, match="number of seconds >= 0"):
        seconds(-value, "x")


@pytest.mark.parametrize("serialization", ["pickle", "", None, True, b"safe"])
def test_serialization_is_free_or_safe(serialization: Any) -> None:
    """Nothing else: a word that is misspelt must not mean free."""
    with pytest.raises(RpcUsageError, match="serialization must be 'free' or 'safe'"):
        RpcBackendOptions(serialization=serialization)
    assert RpcBackendOptions(serialization="safe").serialization == "safe"


@pytest.mark.parametrize("value", ["", "a" * 70 + ".example", 5, b"host", "a\0b"])
def test_addresses_are_host_names(value: Any) -> None:
    """What can be no name of a host is refused before anybody tries to reach it."""
    for name in ("address", "bind_address"):
        given: dict[str, Any] = {name: value}
        with pytest.raises(RpcUsageError, match=f"{name} must be a host name"):
            RpcBackendOptions(**given)
        for good in ("::1", "node-7.example"):
            given = {name: good}
            assert getattr(RpcBackendOptions(**given), name) == good


def test_copy_is_independent() -> None:
    """Later changes to the original do not reach the copy, which has every field."""
    options = RpcBackendOptions(num_worker_threads=3, rpc_timeout=7, transports=("tcp",))
    copy = options.copy()
    assert copy == options
    options.num_worker_threads = 9
    assert copy.num_worker_threads == 3


def test_changed_options_are_checked_again_when_used() -> None:
    """A field set to nonsense after construction is found by validate, and by copy."""
    options = RpcBackendOptions()
    options.stream_window = 0
    for check in (options._validate, options.copy):
        with pytest.raises(RpcUsageError, match="stream_window"):
            check()


# ---- devices


def test_device_maps_are_those_of_torch() -> None:
    """Numbers, texts and torch's devices are all the same device; the cpu may be on either side."""
    options = RpcBackendOptions(
        device_maps={"a": {0: "cuda:1", "cpu": torch.device("cuda:2")}, "b": {"1": "cpu"}},
        devices=[1, "cuda:0", "cuda:2"],
    )
    assert options.device_maps == {"a": {CUDA[0]: CUDA[1], CPU: CUDA[2]}, "b": {CUDA[1]: CPU}}
    assert options.devices == [CUDA[1], CUDA[0], CUDA[2]]
    nothing: dict[str, Any] = {"device_maps": None, "devices": None}
    assert RpcBackendOptions(**nothing) == RpcBackendOptions()


def test_a_device_map_is_set_bit_by_bit() -> None:
    """Each call adds to what is there, also to what was given at first; others are not touched."""
    options = RpcBackendOptions(device_maps={"a": {0: 1}})
    options.set_device_map("a", {1: 0, 0: 1})
    options.set_device_map("b", {"cpu": "cpu"})
    assert options.device_maps == {"a": {CUDA[0]: CUDA[1], CUDA[1]: CUDA[0]}, "b": {CPU: CPU}}


def test_two_sources_for_one_target_are_found_at_init_as_by_torch() -> None:
    """What `set_device_map` adds may lead to a target that is taken: the group refuses it, on all its members."""
    options = RpcBackendOptions(device_maps={"a": {0: 1}})
    options.set_device_map("a", {1: 1})
    options.copy()._validate()
    claims = {"a": DeviceClaims(2), "b": options._device_claims(2)}
    with pytest.raises(ValueError, match="Node b has duplicated target devices in its device map for a"):
        check_device_maps(claims)


def test_devices_are_cuda_devices() -> None:
    """A ValueError of torch, from the argument and from `set_devices`, which replaces what was there."""
    text = "`set_devices` expect a list of CUDA devices, but got device type cpu"
    with pytest.raises(ValueError, match=text):
        RpcBackendOptions(devices=["cpu"])
    options = RpcBackendOptions(devices=[0])
    with pytest.raises(ValueError, match=text):
        options.set_devices([1, "cpu"])
    assert options.devices == [CUDA[0]]
    options.set_devices([2, "1"])
    assert options.devices == [CUDA[2], CUDA[1]]


@pytest.mark.parametrize("value", ["cert.pem", True, {"cert": "c", "key": "k", "ca": "a"}])
def test_tls_is_a_tls(value: Any) -> None:
    """What is no Tls is refused with how to make one; whether its files are there is seen at joining."""
    with pytest.raises(RpcUsageError, match=r"tls must be a Tls \(rpc.Tls"):
        RpcBackendOptions(tls=value)
    assert RpcBackendOptions(tls=Tls("c", "k", "a")).copy().tls == Tls("c", "k", "a")


@pytest.mark.parametrize(("name", "value"), [("cert", ""), ("key", None), ("ca", 5)])
def test_files_of_tls_are_paths(name: str, value: Any) -> None:
    """The error names the one that is none."""
    given: dict[str, Any] = {"cert": "c", "key": "k", "ca": Path("a"), name: value}
    with pytest.raises(RpcUsageError, match=f"{name} of Tls must be the path"):
        Tls(**given)
    with pytest.raises(RpcUsageError, match="verify_names of Tls must be True or False"):
        Tls("c", "k", "a", verify_names=1)  # type: ignore[arg-type]  # misuse


def test_tls_of_the_environment() -> None:
    """All three files or none; a name check that is turned off is 0."""
    every = {"AIORPC_TLS_CERT": "c", "AIORPC_TLS_KEY": "k", "AIORPC_TLS_CA": "a"}
    assert Tls._from_environment({}) is None
    assert Tls._from_environment(every) == Tls("c", "k", "a")
    assert Tls._from_environment(every | {"AIORPC_TLS_VERIFY_NAMES": "0"}) == Tls("c", "k", "a", verify_names=False)
    with pytest.raises(RpcUsageError, match="TLS needs AIORPC_TLS_KEY, AIORPC_TLS_CA too"):
        Tls._from_environment({"AIORPC_TLS_CERT": "c", "AIORPC_TLS_CA": ""})
    with pytest.raises(RpcUsageError, match="AIORPC_TLS_VERIFY_NAMES must be 0 or 1"):
        Tls._from_environment(every | {"AIORPC_TLS_VERIFY_NAMES": "no"})


def test_allow_may_be_given_as_serve() -> None:
    """As programs from before the release do."""
    assert RpcBackendOptions(serve=["a:b"]).allow == RpcBackendOptions(allow=["a:b"]).allow == ("a:b",)


def test_options_can_be_replaced() -> None:
    """By `dataclasses.replace`: the copy has what is said, and all else as it was."""
    made = replace(RpcBackendOptions(limits=LimitOptions(max_streams=5), allow=["a:b"]), rpc_timeout=3)
    assert (made.max_streams, made.allow, made.rpc_timeout) == (5, ("a:b",), 3)
