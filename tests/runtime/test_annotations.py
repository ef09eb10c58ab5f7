"""What functions take and classes declare, as a program without ``from __future__ import annotations`` defines them."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from aiorpc import RpcUsageError, batched
from aiorpc.runtime.caller.misuse import check_keywords
from aiorpc.runtime.calls.batching import get_batcher
from aiorpc.runtime.calls.functions import check_pattern

LAZY = pytest.mark.skipif(sys.version_info < (3, 14), reason="Python looks annotations up where they stand until 3.14")


def program(source: str) -> ModuleType:
    """A module with that source, which does not inherit how this one has its annotations."""
    module = ModuleType("program_with_annotations")
    exec(compile(source, module.__name__, "exec", dont_inherit=True), vars(module))
    return module


def test_what_instances_have_is_known_from_annotations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern may name what the class alone has not; Python 3.14 keeps annotations elsewhere than in its names."""
    module = program("class Base:\n    width: int\nclass Model(Base):\n    depth: int")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    check_pattern(f"{module.__name__}:Model.width")
    check_pattern(f"{module.__name__}:Model.depth")
    with pytest.raises(RpcUsageError, match=r"has no 'Model\.height'"):
        check_pattern(f"{module.__name__}:Model.height")


@LAZY
def test_an_annotation_may_name_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As what is imported for type checkers alone."""
    module = program(
        "def add(a: Absent, timeout: int = 1) -> Absent: ...\n"
        "def most() -> Absent: return 2\n"
        "class Model:\n    width: Absent"
    )
    check_keywords(module.add, {"timeout": 5}, "worker1")
    with pytest.raises(RpcUsageError, match="takes no argument 'retries'"):
        check_keywords(module.add, {"retries": 5}, "worker1")
    assert get_batcher(batched(max_size=module.most)(module.add)) is not None
    monkeypatch.setitem(sys.modules, module.__name__, module)
    check_pattern(f"{module.__name__}:Model.width")
