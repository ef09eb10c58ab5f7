"""Rights: which names a rule allows, for which role, and which rules are refused. Nothing is imported or run for it."""

from __future__ import annotations

import pytest

from aiorpc import RpcBackendOptions, RpcUsageError, exposed
from aiorpc.rights import Rights, check_role

HERE = __name__


@exposed
def marked() -> None:
    """Anybody with a rule for marks may call it."""


def unmarked() -> None:
    """Only who has its name."""


class Base:
    """Its methods are inherited."""

    def inherited(self) -> None: ...

    @exposed
    def marked_here(self) -> None: ...


@exposed
class Marked(Base):
    """Everything public of it may be called."""

    def public(self) -> None: ...

    def _private(self) -> None: ...

    def __call__(self) -> None: ...

    def __len__(self) -> int:
        return 0


class Child(Marked):
    """The mark is not inherited, but the marked class' own methods are what they are."""

    def own(self) -> None: ...


CASES = [
    # rule, name, whether it is allowed
    (None, "os:system", True),
    ("*", "os:system", True),
    (["a:f", "*"], "os:system", True),
    ([], "a:f", False),
    ("a:f", "a:f", True),
    (["a:f"], "a:g", False),
    (["a:f"], "a:f.g", False),
    (["a:*"], "a:f", True),
    (["a:*"], "a:F.g", True),
    (["a:*"], "a.b:f", False),
    (["a*"], "a.b:f", True),
    (["a.*"], "a:f", False),
    (["a.*:f"], "a.b.c:f", True),
    (["a:F.*"], "a:F", False),
    (["a:F.*"], "a:F.g", True),
    (["a:f?"], "a:f1", True),
    (["a:f[12]"], "a:f3", False),
    (["a:*"], "A:f", False),
    (["a:*"], "a:_f", False),
    (["a:*"], "a:F._g", False),
    (["a:*"], "a:F.__init__", False),
    (["a:*"], "a:F.__call__", True),
    (["a:*"], "a:f.__globals__", False),
    (["a:_*"], "a:_f", True),
    (["a:_*"], "a:_F._g", False),
    (["a:F._*"], "a:F._g", True),
    (["a:F._*"], "a:_F._g", False),
    (["a:_f"], "a:_f", True),
    (["a:*"], f"a:{'f' * 2000}", False),
    (["*:*"], "os:system", True),
    (["a:*"], "a:f\nb:g", True),  # a strange name, of the same module
    (["a:f"], "a:f\n", False),
    ([exposed], "a:f", False),
]


@pytest.mark.parametrize(("rule", "name", "allowed"), CASES)
def test_a_name_is_allowed(rule: object, name: str, allowed: bool) -> None:
    """By its pattern, whose `*` does not stand for what is private."""
    assert Rights(rule).allowed("", name) is allowed


RESOURCES = [
    # rule, what is wanted, whether it is allowed
    (["queue/samples:put"], ("queue", "samples", "put"), True),
    (["queue/samples:put"], ("queue", "samples", "get"), False),
    (["queue/samples:put"], ("queue", "sample", "put"), False),
    (["queue/samples:put"], ("published", "samples", "put"), False),
    (["queue/samples-*:get"], ("queue", "samples-7", "get"), True),
    (["queue/samples-[12]:[gl]*"], ("queue", "samples-2", "look"), True),
    (["queue/samples-[12]:[gl]*"], ("queue", "samples-3", "look"), False),
    (["queue/*:*"], ("queue", "a:b", "shutdown"), True),
    (["queue/a:b:get"], ("queue", "a:b", "get"), True),
    (["queue/a:*:get"], ("queue", "a:b:c", "get"), True),
    (["queue/a:get"], ("queue", "a:b", "get"), False),
    (["published/policy:read"], ("published", "policy", "read"), True),
    (["published/policy:read"], ("published", "policy", "publish"), False),
    (["object/env-?:step"], ("object", "env-1", "step"), True),
    (["object/env-?:step"], ("object", "env-1", "steps"), False),
    (["object/env:*"], ("object", "env", "step"), True),
    (["barrier/*:come"], ("barrier", "", "come"), True),
    (["barrier/:come"], ("barrier", "", "come"), True),
    (["barrier/:come"], ("barrier", "epoch", "come"), False),
    (["barrier/epoch 1/2:come"], ("barrier", "epoch 1/2", "come"), True),
    (["queue/*:put"], ("queue", "q" * 2000, "put"), False),
    (["queue/Q:put"], ("queue", "q", "put"), False),
    (["*"], ("queue", "q", "put"), True),
    (None, ("barrier", "", "come"), True),
    ([], ("queue", "q", "put"), False),
    (["*:*"], ("queue", "q", "put"), False),
    (["aiorpc*"], ("queue", "q", "put"), False),
    ([exposed], ("queue", "q", "put"), False),
    ([exposed], ("published", "q", "read"), False),
    ([exposed], ("object", "q", "step"), False),
]


@pytest.mark.parametrize(("rule", "wanted", "allowed"), RESOURCES)
def test_what_has_a_name_is_allowed(rule: object, wanted: tuple[str, str, str], allowed: bool) -> None:
    """By patterns of its own, which are no names of functions; neither marks nor names of functions allow it."""
    assert Rights(rule).allowed_resource("", *wanted) is allowed


def test_patterns_for_what_has_a_name_allow_no_function() -> None:
    """And they are no patterns for modules, which are looked for when a worker joins."""
    rights = Rights(["queue/*:*", "object/*:*", "a:f"])
    assert not rights.allowed("", "queue/q:put") and not rights.allowed("", "object/q:f")
    assert [*rights.patterns()] == ["a:f"] and rights.limited("")
    assert rights.describe("") == "allow= gives workers without a role only 'queue/*:*', 'object/*:*', 'a:f'"


def test_an_attribute_of_an_object_is_listed_by_its_name() -> None:
    """A pattern with wildcards for it is for methods alone."""
    assert Rights("object/*:step").listed_method("", "env", "step")
    assert not Rights("object/env:st*").listed_method("", "env", "step") and Rights("*").listed_method("", "env", "x")


def test_all_functions_by_name_is_less_than_everything() -> None:
    """Only `*` lets functions by value run, which no pattern has a name for."""
    assert not Rights().limited("") and not Rights("*").limited("") and not Rights(["a:f", "*"]).limited("")
    assert Rights("*:*").limited("") and Rights([]).limited("")


def test_roles_have_rules_of_their_own() -> None:
    """A role without one has that of `*`, and nothing if there is none."""
    rights = Rights({"actor": ["a:f"], "learner": "*", "*": "a:g"})
    assert rights.allowed("actor", "a:f") and not rights.allowed("actor", "a:g")
    assert not rights.limited("learner")
    assert [rights.allowed(role, "a:g") for role in ("", "other", "actor")] == [True, True, False]
    assert not Rights({"actor": "a:f"}).allowed("", "a:f")
    assert Rights({"": "a:f"}).allowed("", "a:f")


def test_marks_count_where_a_rule_has_them() -> None:
    """A function's own mark; without the rule it means nothing."""
    rights = Rights({"actor": exposed, "other": [f"{HERE}:unmarked"]})
    assert rights.allowed("actor", f"{HERE}:marked", marked)
    assert not rights.allowed("actor", f"{HERE}:unmarked", unmarked)
    assert not rights.allowed("other", f"{HERE}:marked", marked)


@pytest.mark.parametrize(
    ("kind", "method", "allowed"),
    [
        (Marked, "public", True),
        (Marked, "inherited", True),
        (Marked, "__call__", True),
        (Marked, "attribute", True),
        (Marked, "_private", False),
        (Marked, "__len__", False),
        (Marked, "__setattr__", False),
        (Base, "inherited", False),
        (Base, "marked_here", True),
        (Child, "public", True),
        (Child, "marked_here", True),
        (Child, "own", False),
        (Child, "inherited", False),
        (Child, "attribute", False),
    ],
)
def test_a_method_is_allowed_by_a_mark(kind: type, method: str, allowed: bool) -> None:
    """Its own, or that of its class or of the one that it has inherited it from; a class does not inherit the mark."""
    assert Rights(exposed).allowed_method("", kind, method) is allowed


@pytest.mark.parametrize(
    ("pattern", "kind", "method", "allowed"),
    [
        (f"{HERE}:Base.inherited", Base, "inherited", True),
        (f"{HERE}:Base.inherited", Child, "inherited", True),
        (f"{HERE}:Child.inherited", Base, "inherited", False),
        (f"{HERE}:Child.*", Child, "inherited", True),
        (f"{HERE}:Child.*", Child, "__class__", False),
        (f"{HERE}:Child.*", Child, "attribute", True),
        (f"{HERE}:Child", Child, "own", False),
        (f"{HERE}:Base.*", Child, "own", False),
        ("builtins:dict.get", dict, "get", True),
        ("builtins:dict.*", dict, "__getitem__", False),
        ("builtins:dict.__getitem__", dict, "__getitem__", True),
    ],
)
def test_a_method_is_allowed_by_a_pattern(pattern: str, kind: type, method: str, allowed: bool) -> None:
    """In the name of the value's class, or of the class that has it."""
    assert Rights(pattern).allowed_method("", kind, method) is allowed


def test_a_value_may_be_fetched() -> None:
    """As if that were a method of its class, or where its class bears the mark."""
    assert Rights("builtins:dict.to_here").allowed_value("", dict)
    assert Rights("*.to_here").allowed_value("", dict)
    assert not Rights("builtins:dict").allowed_value("", dict)
    assert Rights(exposed).allowed_value("", Marked) and not Rights(exposed).allowed_value("", Child)


def test_a_rule_is_told() -> None:
    """For the error of whoever was refused, and not at any length."""
    rights = Rights({"actor": ["a:f", exposed], "none": []})
    assert rights.describe("actor") == "allow= gives role 'actor' only 'a:f', rpc.exposed"
    assert rights.describe("none") == "allow= gives role 'none' nothing"
    assert rights.describe("") == "allow= gives workers without a role (as all that it does not name) nothing"
    assert len(Rights([f"a:{'f' * 100}{each}" for each in range(100)]).describe("")) < 400


@pytest.mark.parametrize(
    ("allow", "said"),
    [
        (1, "a list of patterns"),
        (b"a:f", "a list of patterns"),
        (unmarked, "a list of patterns"),
        ([unmarked], "neither a pattern"),
        ([["a:f"]], "neither a pattern"),
        ([None], "neither a pattern"),
        ("", "matches no name"),
        (["a"], "'module:*'"),
        (["a.f"], "'module:*'"),
        (["a:f:g"], "matches no name"),
        ([":f"], "empty"),
        (["a:"], "empty"),
        (["queues/q:put"], "no kind of what has a name, and these are: queue, published, object, barrier"),
        (["*/q:put"], "no kind"),
        (["a.b/c:f"], "no kind"),
        (["queue/q"], "'queue/NAME:VERB'"),
        (["queue/q:"], "'queue/NAME:VERB'"),
        (["queue/:put"], "'queue/NAME:VERB'"),
        (["queue/q:push"], "what may be done with it is: put, get, look, shutdown"),
        (["queue/q:x*"], "what may be done"),
        (["queue/my queue:put"], "can be no name"),
        (["queue/a/b:put"], "can be no name"),
        (["published/a b:read"], "can be no name"),
        (["published/w:get"], "what may be done with it is: publish, read"),
        (["object/env:_step"], "no public method"),
        (["object/env:a.b"], "no public method"),
        (["barrier/:join"], "what may be done with it is: come"),
        (["aiorpc.queues.served:ServedQueue.put_items"], "'queue/NAME:put'"),
        (["aiorpc.queues.*:*"], "'queue/NAME:put'"),
        (["*:ServedQueue.take_items"], "'queue/NAME:put'"),
        ({"actor": 1}, "allow['actor'] is a list"),
        ({"actor": {"x": "a:f"}}, "allow['actor'] is a list"),
        ({"an actor": "a:f"}, "a role has"),
        ({1: "a:f"}, "a role must be a string"),
        ({None: "a:f"}, "a role must be a string"),
    ],
)
def test_what_is_no_rule_is_refused(allow: object, said: str) -> None:
    """When the options are made, with what it should be."""
    with pytest.raises(RpcUsageError) as refused:
        RpcBackendOptions(allow=allow)  # type: ignore[arg-type]  # wrong on purpose
    assert said in str(refused.value)


@pytest.mark.parametrize("role", ["*", "an actor", "é", "a" * 128, None, 3, b"actor"])
def test_a_role_cannot_be(role: object) -> None:
    """RpcUsageError says what it is."""
    with pytest.raises(RpcUsageError, match="a role"):
        check_role(role)


@pytest.mark.parametrize("thing", [print, property(lambda self: self), 3, "f", None])
def test_what_takes_no_mark_is_refused(thing: object) -> None:
    """`exposed` of a builtin or of what is no function."""
    with pytest.raises(RpcUsageError, match="exposed"):
        exposed(thing)


def test_a_mark_is_put_on_either_side_of_a_static_method() -> None:
    """And of a class method."""

    class Both:
        @exposed
        @staticmethod
        def one() -> None: ...

        @staticmethod
        @exposed
        def two() -> None: ...

        @exposed
        @classmethod
        def three(cls) -> None: ...

        @staticmethod
        def four() -> None: ...

    allowed = [Rights(exposed).allowed_method("", Both, name) for name in ("one", "two", "three", "four")]
    assert allowed == [True, True, True, False]
