"""Devices and their maps: what is meant, what is refused, and which claims of a group fit together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiorpc.devices import (
    CPU,
    DeviceClaims,
    check_device_maps,
    devices_used,
    extend_device_map,
    to_device,
    to_device_map,
    to_device_maps,
    to_devices,
)
from aiorpc.errors import DeviceMapError


def cuda(index: int) -> torch.device:
    """The CUDA device of that number."""
    return torch.device("cuda", index)


def claims(
    count: int = 0,
    maps: Mapping[str, Mapping[Any, Any]] | None = None,
    devices: list[int] | None = None,
    kind: str = "cuda",
) -> DeviceClaims:
    """What a worker says that set these options."""
    return DeviceClaims(count, tuple(to_devices(devices or [])), to_device_maps(maps or {}), kind)


def refusal(found: Mapping[str, DeviceClaims], fixed: bool = True) -> list[str]:
    """The lines of what the check of these claims raises."""
    with pytest.raises(DeviceMapError) as caught:
        check_device_maps(found, fixed)
    return str(caught.value).split("\n")


# ---- one device


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (0, cuda(0)),
        (3, cuda(3)),
        (127, cuda(127)),
        ("1", cuda(1)),
        ("cuda", cuda(0)),
        ("cuda:2", cuda(2)),
        (torch.device("cuda:2"), cuda(2)),
        (torch.device("cuda"), cuda(0)),
        ("xpu:1", torch.device("xpu", 1)),
        ("mps", torch.device("mps", 0)),
        ("cpu", torch.device("cpu")),
        ("cpu:0", torch.device("cpu")),
        (torch.device("cpu", 3), torch.device("cpu")),
    ],
)
def test_a_device_is_meant_by_number_text_or_itself(given: Any, meant: torch.device) -> None:
    """Numbers are CUDA's, also where there is none; all but the cpu have an index."""
    assert to_device(given) == meant
    assert (to_device(given).index is None) == (meant == CPU)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "gpu",
        "cuda:",
        "cuda:x",
        "cuda:01",
        "cuda:0:1",
        " cuda",
        "²",
        "1" * 5000,
        "x" * 5000,
        None,
        True,
        1.0,
        b"1",
        [],
    ],
)
def test_what_is_no_device_is_refused(value: Any) -> None:
    """The error shows it, however long it is, in one short line."""
    with pytest.raises(DeviceMapError, match="is no device") as caught:
        to_device(value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", [-1, "-1", "cuda:-1", torch.device("cuda", 128)])
def test_a_negative_index_is_refused_as_torch_does(value: Any) -> None:
    """With torch's words, in an error that is a RuntimeError, too. What torch made negative itself is none either."""
    with pytest.raises(RuntimeError, match="Device index must not be negative"):
        to_device(value)


@pytest.mark.parametrize("value", [128, 256, "cuda:300"])
def test_an_index_that_torch_would_take_for_another_is_refused(value: Any) -> None:
    """torch keeps eight bits of it: cuda:300 would be cuda:44."""
    with pytest.raises(DeviceMapError, match="the highest index is 127"):
        to_device(value)


# ---- lists and maps


def test_a_list_of_devices_has_cuda_devices_only() -> None:
    """torch's words."""
    with pytest.raises(ValueError, match=r"`set_devices` expect a list of CUDA devices, but got device type cpu\."):
        to_devices([0, "cpu"])
    for value in ("cuda:0", 5, None):
        with pytest.raises(ValueError, match="devices must be a list of devices"):
            to_devices(value)  # type: ignore[arg-type]  # misuse


def test_a_map_of_devices() -> None:
    """Numbers, texts and devices mix; the cpu may stand on either side."""
    assert to_device_map({0: "cuda:1", "1": "cpu", "cpu": torch.device("cuda")}) == {
        cuda(0): cuda(1),
        cuda(1): CPU,
        CPU: cuda(0),
    }


@pytest.mark.parametrize(
    ("mapping", "text"),
    [
        ({0: 1, 2: 1}, "trying to map cuda:2 and cuda:0 to cuda:1"),
        ({0: "cpu", 1: "cpu:0"}, "trying to map cuda:1 and cuda:0 to cpu"),
        ({0: 1, "cuda:0": 2}, "trying to map cuda:0 to cuda:2 and cuda:1"),
    ],
)
def test_a_map_is_one_to_one(mapping: dict[Any, Any], text: str) -> None:
    """torch's words; also for two ways to write one device, where torch takes the last."""
    with pytest.raises(ValueError, match=f"^`device_map` only supports 1-to-1 mapping, {text}$"):
        to_device_map(mapping)


def test_a_map_is_extended_without_a_contradiction() -> None:
    """What was there may be said again; another target for it is refused. A target in use is init's to refuse."""
    known = to_device_map({0: 1})
    assert extend_device_map(known, {1: 0, "cuda:0": 1}) == {cuda(0): cuda(1), cuda(1): cuda(0)}
    with pytest.raises(
        ValueError, match=r"^`set_device_map` only supports 1-to-1 mapping, .* cuda:0 to cuda:2 and cuda:1$"
    ):
        extend_device_map(known, {0: 2})
    assert extend_device_map(known, {3: 1}) == {cuda(0): cuda(1), cuda(3): cuda(1)}
    assert known == {cuda(0): cuda(1)}


@pytest.mark.parametrize(
    ("maps", "text"),
    [
        ({"w": 5}, "a device map must be a dictionary, not 5"),
        ([("w", {0: 1})], "device_maps must be a dictionary"),
        ({5: {0: 1}}, "by their names, not to 5"),
        ({"": {0: 1}}, "by their names, not to ''"),
        ({"x" * 128: {0: 1}}, "by their names"),
        ({"w": {0: None}}, "None is no device"),
    ],
)
def test_maps_are_dictionaries_by_name(maps: Any, text: str) -> None:
    """Anything else is a DeviceMapError."""
    with pytest.raises(DeviceMapError, match=text):
        to_device_maps(maps)


# ---- claims


def test_claims_travel_as_json() -> None:
    """What is read is what was written."""
    made = claims(3, {"b": {0: 1, "cpu": 2}, "c": {2: "cpu"}, "empty": {}}, [2, 0])
    for each in (made, DeviceClaims(), claims(1, {"b": {"xpu:0": 0}}, kind="xpu")):
        assert DeviceClaims.from_json(json.loads(json.dumps(each.to_json()))) == each
    assert made.to_json() == [
        3,
        "cuda",
        ["cuda:2", "cuda:0"],
        {"b": {"cuda:0": "cuda:1", "cpu": "cuda:2"}, "c": {"cuda:2": "cpu"}, "empty": {}},
    ]


@pytest.mark.parametrize(
    "value",
    [
        None,
        "claims",
        {},
        [],
        [1, "cuda", []],
        [1, "cuda", [], {}, 0],
        [True, "cuda", [], {}],
        [-1, "cuda", [], {}],
        [129, "cuda", [], {}],
        [1.0, "cuda", [], {}],
        [1, "cpu", [], {}],
        [1, "", [], {}],
        [1, "1", [], {}],
        [1, "cuda:0", [], {}],
        [1, "gpu", [], {}],
        [1, "cuda", {}, {}],
        [1, "cuda", ["0"], {}],
        [1, "cuda", ["cuda"], {}],
        [1, "cuda", ["cpu:0"], {}],
        [1, "cuda", [0], {}],
        [1, "cuda", [["cuda:0"]], {}],
        [1, "cuda", ["cuda:0"] * 1025, {}],
        [1, "cuda", [], []],
        [1, "cuda", [], {"": {}}],
        [1, "cuda", [], {"x" * 128: {}}],
        [1, "cuda", [], {"b": []}],
        [1, "cuda", [], {"b": {"cuda:0": 1}}],
        [1, "cuda", [], {"b": {"0": "cuda:1"}}],
        [1, "cuda", [], {"b": {"cuda:0": "cuda:128"}}],
        [1, "cuda", [], {str(number): {} for number in range(65_537)}],
    ],
    ids=lambda value: repr(value)[:40],
)
def test_claims_that_are_none_of_ours_are_refused(value: Any) -> None:
    """Each number, length, text and type is looked at."""
    with pytest.raises(DeviceMapError):
        DeviceClaims.from_json(value)


PIECES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["cuda", "cuda:0"])
)
ANY_JSON = st.recursive(
    PIECES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
)


@given(ANY_JSON | st.tuples(st.integers(0, 9), st.just("cuda"), st.lists(ANY_JSON, max_size=2), ANY_JSON).map(list))
def test_nothing_else_is_raised_for_claims(value: Any) -> None:
    """Whatever stands in the store, it is claims or a DeviceMapError."""
    try:
        found = DeviceClaims.from_json(value)
    except DeviceMapError:
        return
    assert found.to_json() == value


# ---- the claims of a group


def test_claims_that_fit() -> None:
    """In a circle, to oneself, with the cpu on either side, with devices set or not, and with none at all."""
    check_device_maps({})
    check_device_maps({"a": claims(), "b": claims(4)})
    check_device_maps(
        {
            "a": claims(2, {"b": {0: 1, 1: 0}, "a": {0: 1}}),
            "b": claims(3, {"a": {2: 1, "cpu": "cpu"}}, [0, 1, 2]),
            "c": claims(0, {"a": {"cpu": 0}}),
            "d": claims(1, {"c": {0: "cpu"}}),
        }
    )


def test_the_cpu_needs_no_device_where_devices_are_set() -> None:
    """Neither as a source nor as a target."""
    check_device_maps({"a": claims(1, {"b": {"cpu": 0, 0: "cpu"}}, [0]), "b": claims(1, devices=[0])})


def test_maps_to_workers_that_do_not_exist() -> None:
    """In a group of fixed size; in a free one they may join later."""
    found = {"a": claims(1, {"b": {0: 0}, "nobody": {0: 0}}), "b": claims(1)}
    first, rest = refusal(found)
    assert first == "Node a has invalid target node names in its device maps"
    assert rest == "There is no nobody; there are a, b"
    check_device_maps(found, fixed=False)


FIRST_LINES: dict[str, tuple[dict[str, DeviceClaims], str]] = {
    "Node b has duplicated devices": (
        {"a": claims(2), "b": claims(2, devices=[1, 0, 1])},
        "More than once: cuda:1",
    ),
    "Node b has devices with invalid indices": (
        {"a": claims(4), "b": claims(2, devices=[0, 2, 3])},
        "b has no cuda:2, cuda:3; its cuda devices are 2 in number",
    ),
    "Node a has duplicated target devices in its device map for b": (
        {"a": DeviceClaims(2, (), {"b": {cuda(0): cuda(0), cuda(1): cuda(0)}}), "b": claims(2)},
        "More than once: cuda:0",
    ),
    "Node a has unexpected source devices in its device map for b": (
        {"a": claims(2, {"b": {0: 0, 1: 1}}, [0]), "b": claims(2)},
        "Not among the devices set for a, cuda:0: cuda:1",
    ),
    "Node a has source devices with invalid indices in its device map for b": (
        {"a": claims(1, {"b": {1: 0}}), "b": claims(2)},
        "a has no cuda:1; its cuda devices are 1 in number",
    ),
    "Node a has unexpected target devices in its device map for b": (
        {"a": claims(2, {"b": {0: 0, 1: 1}}), "b": claims(2, devices=[1])},
        "Not among the devices set for b, cuda:1: cuda:0",
    ),
    "Node a has target devices with invalid indices in its device map for b": (
        {"a": claims(4, {"b": {0: 2}}), "b": claims(2)},
        "b has no cuda:2; its cuda devices are 2 in number",
    ),
}


@pytest.mark.parametrize("first", FIRST_LINES)
def test_claims_that_do_not_fit(first: str) -> None:
    """torch's words, and then which devices."""
    found, rest = FIRST_LINES[first]
    assert refusal(found) == [first, rest]


def test_the_first_in_order_is_named_on_all() -> None:
    """Devices of all come before maps of any; then the order of the members decides."""
    bad_map, bad_devices = claims(1, {"x": {0: 0}}), claims(1, devices=[1])
    assert refusal({"a": bad_map, "b": bad_map, "c": bad_devices})[0].startswith("Node c has devices")
    assert refusal({"a": bad_map, "b": bad_map})[0].startswith("Node a has invalid target")


# ---- which devices a worker uses


def test_devices_used_are_those_of_all_maps() -> None:
    """Sources of its own, and targets of those of the others and its own for it; never the cpu; in order."""
    found = {
        "a": claims(8, {"b": {3: 0, "cpu": 7}, "a": {1: 0}}),
        "b": claims(8, {"a": {0: 5, 1: "cpu"}, "c": {6: 6}}),
        "c": claims(8),
    }
    check_device_maps(found)
    assert devices_used("a", found) == [cuda(0), cuda(1), cuda(3), cuda(5)]
    assert devices_used("b", found) == [cuda(0), cuda(1), cuda(6), cuda(7)]
    assert devices_used("c", found) == [cuda(6)]
    assert devices_used("c", {"c": claims(8)}) == []


def test_devices_that_are_set_are_those_used() -> None:
    """In order, whatever the maps name."""
    found = {"a": claims(8, {"a": {2: 4}}, [4, 6, 2])}
    assert devices_used("a", found) == [cuda(2), cuda(4), cuda(6)]
