"""What a worker runs for others: the option ``allow`` and the decorator `exposed`. Decides by names, without I/O.

A rule is for callers of one role. It is a list of patterns for names on the wire (``module:qualname``), and of
`exposed`, which stands for everything with the mark of this decorator. A method of a reference's value has the name
``module:Class.method``; fetching the value is the method ``to_here``. Resources (`RESOURCES`: queues, published values,
objects, barriers) have patterns ``kind/name:verb``. A module has no '/' in its name, so no pattern is of both sorts.
`exposed` allows no resources.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType, MethodType
from typing import Any, TypeVar

from .errors import RpcUsageError

#: As a rule, or a pattern of a rule: everything, even functions that travel by value. As a role: all other roles.
EVERYTHING = "*"
#: The name of fetching the value of a reference, as if it were a method of the value.
FETCH = "to_here"
#: The kinds of resources, and the verbs of each. The verbs of an object are its public methods.
RESOURCES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "queue": ("put", "get", "look", "shutdown"),
        "published": ("publish", "read"),
        "object": (),
        "barrier": ("come",),
    }
)
# No name on the wire is longer than this; patterns are not tried on longer ones.
NAME_LIMIT = 1024
ROLE_LIMIT = 128
_TEXT_LIMIT = 300
_ROLE = re.compile(r"[A-Za-z0-9\-_:]*")
_WILD = re.compile(r"[*?\[]")
_MARK = "_aiorpc_exposed"
_NOTHING = object()
_SET = re.compile(r"\[!?\]?[^\]]*\]")  # in a pattern of fnmatch: one of these characters
# Names of workers, objects and queues, and of published values (`protocol.identity.check_name`).
_NAMED = re.compile(r"[A-Za-z0-9\-_:]*")
_PUBLISHED = re.compile(r"[A-Za-z0-9\-_:./]*")
_OF_QUEUES = re.compile(r"aiorpc\.queues\b|\bServedQueue\b")

T = TypeVar("T")


def exposed(fn: T) -> T:
    """Mark a function, a method or a class that other workers may call, for rules that have ``rpc.exposed``.

    The mark of a class allows making instances, calling their public methods, inherited ones included, and fetching
    them. The mark of a method allows this method alone. Without such a rule in the option ``allow`` the mark changes
    nothing. With ``@staticmethod`` and ``@classmethod`` it may be written on either side.

    Raised here: RpcUsageError for an object that takes no mark, such as a property.
    """
    target: Any = fn.__func__ if isinstance(fn, (staticmethod, classmethod)) else fn
    try:
        if not callable(target):
            raise TypeError("it cannot be called")
        setattr(target, _MARK, True)
    except (AttributeError, TypeError) as error:
        raise RpcUsageError(
            f"@rpc.exposed is for functions, methods and classes, not for {fn!r:.80}: {error}"
        ) from None
    return fn


def check_role(role: object) -> str:
    """Return `role` if it is valid. Raises RpcUsageError if not."""
    if not isinstance(role, str):
        raise RpcUsageError(f"a role must be a string, but got {role!r:.80}; a worker without one has the role ''")
    if len(role) >= ROLE_LIMIT or not _ROLE.fullmatch(role):
        raise RpcUsageError(
            f"a role has less than {ROLE_LIMIT} letters, digits, '-', '_' and ':', but got {role!r:.80}; "
            "a worker without one has the role ''"
        )
    return role


def frozen(allow: object) -> Any:
    """The option ``allow`` as an immutable value: None, a tuple, or a new dict of tuples by role.

    Raises RpcUsageError for an invalid rule.
    """
    if allow is None:
        return None
    if not isinstance(allow, Mapping):
        return _frozen_rule(allow, "allow")
    for role in allow:
        if role != EVERYTHING:
            check_role(role)
    return {role: _frozen_rule(rule, f"allow[{role!r}]") for role, rule in allow.items()}


def _frozen_rule(rule: object, where: str) -> tuple[object, ...]:
    items: Any = (rule,) if isinstance(rule, str) or rule is exposed else rule
    if not isinstance(items, (list, tuple, set, frozenset)):
        raise RpcUsageError(f"{where} is a list of patterns 'module:name' and of rpc.exposed, not {rule!r:.80}")
    for item in items:
        if item is exposed:
            continue
        if not isinstance(item, str):
            raise RpcUsageError(f"{where} has {item!r:.80}, which is neither a pattern 'module:name' nor rpc.exposed")
        if "/" in item:
            _check_resource(item, where)
            continue
        if _OF_QUEUES.search(item):
            raise RpcUsageError(
                f"{where} has {item!r:.80}; rights to queues have patterns of their own: 'queue/NAME:put', "
                "'queue/NAME:get', 'queue/NAME:look' and 'queue/NAME:shutdown', with '*' for every queue"
            )
        if item.count(":") != 1 and not (":" not in item and "*" in item):
            raise RpcUsageError(
                f"{where} has {item!r:.80}, which matches no name: names are 'module:function' or "
                "'module:Class.method', so all of one module is 'module:*'"
            )
        if item.startswith(":") or item.endswith(":"):
            raise RpcUsageError(f"{where} has {item!r:.80}, which matches no name: a part of it is empty")
    return tuple(items)


def _check_resource(pattern: str, where: str) -> None:
    """Raise RpcUsageError for a pattern ``kind/name:verb`` that can match nothing."""
    kind, _, rest = pattern.partition("/")
    name, colon, verb = rest.rpartition(":")
    wrong = ""
    if kind not in RESOURCES:
        wrong = f"{kind!r:.40} is no kind of what has a name, and these are: {', '.join(RESOURCES)}"
    elif not colon or not verb or not (name or kind == "barrier"):
        wrong = f"such a pattern is '{kind}/NAME:VERB'"
    elif kind == "object":
        if not _WILD.search(verb) and not (verb.isidentifier() and is_public(verb)):
            wrong = f"{verb!r:.80} is the name of no public method"
    elif not any(map(re.compile(fnmatch.translate(verb)).match, RESOURCES[kind])):
        wrong = f"what may be done with it is: {', '.join(RESOURCES[kind])}"
    published = kind == "published"
    can_be = _PUBLISHED if published else _NAMED
    if not wrong and kind != "barrier" and not can_be.fullmatch(re.sub(r"[*?]", "", _SET.sub("", name))):
        more = "'_', ':', '.' and '/'" if published else "'_' and ':'"
        wrong = f"{name!r:.80} can be no name: names have letters, digits, '-', {more}"
    if wrong:
        raise RpcUsageError(f"{where} has {pattern!r:.160}, which matches nothing: {wrong}")


class Rights:
    """What callers of each role may run on one worker: the option ``allow``, read once. Any thread."""

    def __init__(self, allow: object = None) -> None:
        """allow: the option. Raises RpcUsageError for an invalid rule."""
        rules = frozen(allow)
        if not isinstance(rules, dict):
            rules = {EVERYTHING: rules}
        self._rules = {role: _Rule(rule) for role, rule in rules.items() if role != EVERYTHING}
        self._others = _Rule(rules.get(EVERYTHING, ()))

    def limited(self, role: str) -> bool:
        """Whether there is anything that callers of a role may not run."""
        return not self._of(role).everything

    @property
    def unlimited(self) -> bool:
        """Whether callers of all roles may run everything."""
        return self._others.everything and all(rule.everything for rule in self._rules.values())

    def allowed(self, role: str, name: str, found: object = None, within: type | None = None) -> bool:
        """Whether callers of a role may run a function by its name. found: the object of the name; within: the class
        that it was found in.

        Marks are looked up on these; without them the name alone decides.
        """
        rule = self._of(role)
        if rule.matches(name):
            return True
        if not rule.by_mark or found is None:
            return False
        return is_exposed(found) or (within is not None and is_exposed(within) and is_public(name.rpartition(".")[2]))

    def listed(self, role: str, name: str) -> bool:
        """Whether the rule has exactly this name, or allows everything."""
        rule = self._of(role)
        return rule.everything or name in rule.exact

    def allowed_method(self, role: str, kind: type, method: str) -> bool:
        """Whether callers of a role may call a method of a value of class `kind`.

        A rule for the class counts, and a rule for the class that it inherits the method from. The method may be an
        attribute of the instance alone.
        """
        owner = next((base for base in kind.__mro__ if method in base.__dict__), kind)
        found = owner.__dict__.get(method, _NOTHING)
        return any(self.allowed(role, f"{name_of_class(each)}.{method}", found, each) for each in {kind, owner})

    def allowed_value(self, role: str, kind: type) -> bool:
        """Whether callers of a role may fetch a value of a class that is not a result of their own calls."""
        return self.allowed(role, f"{name_of_class(kind)}.{FETCH}", kind)

    def allowed_resource(self, role: str, kind: str, name: str, verb: str) -> bool:
        """Whether callers of a role may use a verb of a resource. kind, verb: as in `RESOURCES`.

        The rule for everything allows it, `exposed` does not.
        """
        rule = self._of(role)
        return rule.everything or rule.matches_resource(kind, name, verb)

    def listed_method(self, role: str, name: str, method: str) -> bool:
        """Whether the rule has exactly this method of the object `name`, or allows everything."""
        rule = self._of(role)
        return rule.everything or rule.matches_resource("object", name, method, exact=True)

    def patterns(self) -> Iterator[str]:
        """The patterns for functions and methods, of all roles."""
        for rule in (*self._rules.values(), self._others):
            yield from (pattern for pattern in rule.patterns if "/" not in pattern)

    def describe(self, role: str) -> str:
        """The rule for a role, for error texts."""
        who = f"role {role!r}" if role else "workers without a role"
        rule = self._of(role)
        if role not in self._rules and self._rules:
            who = f"{who} (as all that it does not name)"
        return f"allow= gives {who} {rule.text}"

    def _of(self, role: str) -> _Rule:
        return self._rules.get(role, self._others)


class _Rule:
    """The rule of one role. items: patterns and `exposed`; None: everything. patterns: for functions and methods."""

    def __init__(self, items: Iterable[object] | None) -> None:
        given = (EVERYTHING,) if items is None else tuple(items)
        self.everything = EVERYTHING in given
        self.by_mark = exposed in given
        written = [item for item in given if isinstance(item, str) and item != EVERYTHING]
        self.patterns = tuple(item for item in written if "/" not in item)
        self.exact = frozenset(pattern for pattern in self.patterns if not _WILD.search(pattern))
        self._wild = [
            (re.compile(fnmatch.translate(pattern)), pattern.partition(":")[2].split("."))
            for pattern in self.patterns
            if pattern not in self.exact
        ]
        self._resources: dict[str, list[tuple[re.Pattern[str], re.Pattern[str], bool]]] = {}
        for kind, _, rest in (item.partition("/") for item in written if "/" in item):
            name, _, verb = rest.rpartition(":")
            patterns = re.compile(fnmatch.translate(name)), re.compile(fnmatch.translate(verb))
            self._resources.setdefault(kind, []).append((*patterns, not _WILD.search(verb)))
        shown = [repr(pattern) for pattern in written] + ["rpc.exposed"] * self.by_mark
        text = "everything" if self.everything else "only " + ", ".join(shown) if shown else "nothing"
        self.text = text if len(text) <= _TEXT_LIMIT else f"{text[:_TEXT_LIMIT]}..."

    def matches(self, name: str) -> bool:
        """Whether a pattern fits a name."""
        if self.everything or name in self.exact:
            return True
        if len(name) > NAME_LIMIT:
            return False
        return any(pattern.match(name) and _reaches(parts, name) for pattern, parts in self._wild)

    def matches_resource(self, kind: str, name: str, verb: str, exact: bool = False) -> bool:
        """Whether a pattern fits a verb of a resource. exact: whether wildcards do not count for the verb."""
        if len(name) > NAME_LIMIT or len(verb) > NAME_LIMIT:
            return False
        patterns = self._resources.get(kind, ())
        return any((each or not exact) and names.match(name) and verbs.match(verb) for names, verbs, each in patterns)


def _reaches(pattern: list[str], name: str) -> bool:
    """Whether the pattern spells out each private part of a name: ``*`` stands for public parts alone."""
    parts = name.partition(":")[2].split(".")
    private = [place for place, part in enumerate(parts) if not is_public(part)]
    return not private or (len(parts) == len(pattern) and all(pattern[place].startswith("_") for place in private))


def is_public(name: str) -> bool:
    """Whether a name is public: it has no leading underscore, or is ``__call__``."""
    return not name.startswith("_") or name == "__call__"


def is_exposed(found: object) -> bool:
    """Whether a function, method or class has the mark itself; classes do not inherit it."""
    inner = found.__func__ if isinstance(found, (MethodType, staticmethod, classmethod)) else found
    try:
        return vars(inner).get(_MARK) is True
    except TypeError:  # it has no attributes
        return False


def name_of_class(kind: type) -> str:
    """The name of a class on the wire. Spawned children call the main module ``__mp_main__``."""
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__
    return f"{module}:{kind.__qualname__}"


#: The default with safe serialization: marked functions, and all resources except objects.
SAFE_RULE = (exposed, *(f"{kind}/*:*" for kind in RESOURCES if kind != "object"))

Allow = str | Callable[..., Any] | Iterable[Any] | Mapping[str, Any] | None
