"""Who waits for whom in a group: the calls under way, from each program and each handler to what they have called.

Functions of reports alone (`reader.SeenGroup`); they ask no worker. Imports no torch.

A handler that stands at a lock waits for another one of its worker, and no report says for which. `circle` finds those
that wait in a circle: a handler at a lock waits for the handlers of its worker that wait for calls themselves, if no
other one runs there that could hold the lock. Only calls that stand where they stood at an earlier look count.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .reader import SeenGroup
from .report import SeenCall

#: Lines of modules of the standard library in which one waits.
_WAITS = re.compile(r"/(asyncio/\w+|concurrent/futures/\w+|threading|queue|selectors|subprocess|socket)\.py:\d+ in ")
#: Of the calls that one program or handler waits for, so many lines are drawn.
_MOST_DRAWN = 20


@dataclass(frozen=True)
class WaitNode:
    """Who waits: the program of a worker, or the handler of a call that it serves.

    caller, call_id: of the served call; empty and 0 for the program.
    """

    worker: str
    caller: str = ""
    call_id: int = 0


@dataclass(frozen=True)
class Wait:
    """One call that a program or a handler waits for.

    made: the call as its caller sees it. served: as its worker sees it; None if there is no report, or the call is on
    its way. why: what is known of a call that is not served, as a sentence. source_function: of the handler that waits.
    """

    source: WaitNode
    target: WaitNode
    made: SeenCall
    served: SeenCall | None = None
    why: str = ""
    source_function: str = ""


@dataclass
class WaitGraph:
    """waits: by who waits. served: the served calls."""

    waits: dict[WaitNode, list[Wait]] = field(default_factory=dict)
    served: dict[WaitNode, SeenCall] = field(default_factory=dict)


def build(group: SeenGroup) -> WaitGraph:
    """The graph of a group, without the runtime's own calls."""
    graph = WaitGraph()
    for report in group.reports:
        for call in report.calls:
            if call.side == "served" and not call.own:
                graph.served[WaitNode(report.name, call.caller, call.call_id)] = call
    whys = {each.name: each.why for each in group.unseen}
    waits: dict[WaitNode, list[Wait]] = defaultdict(list)
    for report in group.reports:
        lost = {each.name for each in report.members if each.state == "lost"}
        for call in report.calls:
            if call.side != "made" or call.own:
                continue
            source = WaitNode(report.name, *call.parent) if call.parent else WaitNode(report.name)
            target = WaitNode(call.worker, call.caller, call.call_id)
            served = graph.served.get(target)
            why = "" if served else _why(call, lost, whys)
            handler = graph.served.get(source)
            function = "" if handler is None else handler.function
            waits[source].append(Wait(source, target, call, served, why, function))
    graph.waits = dict(waits)
    return graph


def _why(call: SeenCall, lost: set[str], unseen: dict[str, str]) -> str:
    if call.part_of is not None and call.part_of[0] == "queue":
        return f"it waits at queue {call.part_of[1]!r} for an item or for room"
    if call.worker in lost:
        return f"worker {call.worker!r} is lost"
    if call.worker in unseen:
        return f"worker {call.worker!r} cannot be looked at: {unseen[call.worker]}"
    if call.state == "connecting":
        return f"there is no connection to worker {call.worker!r} yet"
    if call.state == "sent":
        return f"the call or its answer is on its way, or worker {call.worker!r} does not read it"
    return call.state


# --- circles ----------------------------------------------------------------------------------------------------------


def circle(before: SeenGroup, now: SeenGroup) -> list[Wait]:
    """The calls between workers that wait for each other in a circle, in order; empty if there are none.

    before, now: two looks at a group, a moment apart. Each call is served at the worker whose handler makes the next
    one; the last one at the worker that makes the first one.
    """
    graph = build(now)
    stuck = _stuck(build(before), graph)
    edges: dict[str, list[Wait]] = defaultdict(list)
    for node in stuck:
        for wait in graph.waits.get(node, ()):
            if wait.target in stuck:
                edges[node.worker].append(wait)
    shortest: list[Wait] = []
    for start in edges:
        found = _way(edges, start)
        if found and (not shortest or len(found) < len(shortest)):
            shortest = found
    # From the first worker of it by name, at each look the same.
    first = min(range(len(shortest)), key=lambda index: shortest[index].source.worker, default=0)
    return shortest[first:] + shortest[:first]


def _way(edges: dict[str, list[Wait]], start: str) -> list[Wait]:
    """The shortest way from a worker back to it."""
    ways: dict[str, list[Wait]] = {start: []}
    front = [start]
    for worker in front:
        for wait in edges.get(worker, ()):
            if wait.target.worker == start:
                return [*ways[worker], wait]
            if wait.target.worker not in ways:
                ways[wait.target.worker] = [*ways[worker], wait]
                front.append(wait.target.worker)
    return []


def _stuck(earlier: WaitGraph, graph: WaitGraph) -> set[WaitNode]:
    """The served calls that cannot end, as far as one sees: what they wait for cannot end either."""
    stuck = {node for node in graph.served if _stands(node, earlier, graph)}
    while True:
        held = _held(graph, stuck)
        ending = {node for node in stuck if not _waits_within(node, graph, stuck, held)}
        if not ending:
            return stuck
        stuck -= ending


def _stands(node: WaitNode, earlier: WaitGraph, graph: WaitGraph) -> bool:
    """Whether a served call stands where it stood."""
    then, now = earlier.served.get(node), graph.served[node]
    return then is not None and (then.state, then.stands_at) == (now.state, now.stands_at)


def _held(graph: WaitGraph, stuck: set[WaitNode]) -> set[str]:
    """The workers whose handlers that may hold locks and threads are stuck, all of them, and at least one."""
    holding: dict[str, bool] = {}
    for node, call in graph.served.items():
        if call.state == "running" and not call.at_lock and call.kind != "stream":
            holding[node.worker] = holding.get(node.worker, True) and node in stuck
    return {worker for worker, all_stuck in holding.items() if all_stuck}


def _waits_within(node: WaitNode, graph: WaitGraph, stuck: set[WaitNode], held: set[str]) -> bool:
    """Whether that call waits for stuck calls alone."""
    call = graph.served[node]
    if call.at_lock or call.state != "running":  # another handler of the worker has to go on
        return node.worker in held
    waits = graph.waits.get(node, ())
    return bool(waits) and all(wait.target in stuck for wait in waits)


# --- drawing ----------------------------------------------------------------------------------------------------------


def as_text(graph: WaitGraph, around: Sequence[Wait] = ()) -> str:
    """The graph as indented text, from the programs to the innermost handlers. around: what `circle` has found."""
    lines = [line for root in _roots(graph) for line in _drawn(graph, root)]
    if around:
        lines += ["", *circle_as_text(around)]
    return "\n".join(lines) or "no program and no handler waits for a call"


def circle_as_text(around: Sequence[Wait]) -> list[str]:
    """A circle as lines: its workers, then each call."""
    names = [each.source.worker for each in around]
    if len(names) == 1:
        lines = [f"worker {names[0]!r} waits for itself:"]
    else:
        lines = [f"{len(names)} workers wait in a circle: {' -> '.join([*names, names[0]])}"]
    for each in around:
        handler = f" in {each.source_function}" if each.source_function else ""
        lines.append(f"  worker {each.source.worker!r}{handler} waits for {_made(each.made)}")
        if each.made.made_at:
            lines.append(f"      made at {each.made.made_at}")
        if each.served is not None:
            lines.append(f"      {_standing(each.served)}")
    return lines


def as_mermaid(graph: WaitGraph) -> str:
    """The graph as a flowchart in mermaid, which GitHub and many notebooks draw."""
    names: dict[WaitNode, str] = {}

    def name_of(node: WaitNode) -> str:
        return names.setdefault(node, f"n{len(names)}")

    lines = []
    for source, waits in graph.waits.items():
        for wait in waits:
            lines.append(f"    {name_of(source)} -->|{wait.made.since:.1f} s| {name_of(wait.target)}")
            if wait.served is None:
                names.setdefault(wait.target, name_of(wait.target))
    asked = {wait.target: wait.made for waits in graph.waits.values() for wait in waits}
    boxes = []
    for node, short in names.items():
        call = graph.served.get(node) or asked.get(node)
        text = f"program of {node.worker}"
        if call is not None and node.caller:
            at = place_of(call)
            text = f"{node.worker}: {call.function}{at and f'<br>{_short(at)}'}"
        boxes.append(f'    {short}["{text.replace(chr(34), "")}"]')
    return "\n".join(["flowchart TD", *boxes, *lines])


def _roots(graph: WaitGraph) -> list[WaitNode]:
    """Who waits, and is waited for by no call that one sees: the programs first."""
    asked = {wait.target for waits in graph.waits.values() for wait in waits}
    found = [node for node in graph.waits if node not in asked]
    return sorted(found, key=lambda node: (bool(node.caller), node.worker, node.caller, node.call_id))


def _drawn(graph: WaitGraph, root: WaitNode) -> Iterator[str]:
    call = graph.served.get(root)
    if not root.caller:
        yield f"the program of worker {root.worker!r} waits"
    elif call is None:
        yield f"a handler of worker {root.worker!r} that has ended has left calls, which wait"
    else:
        yield f"worker {root.worker!r} serves {call.function} for {call.caller!r}, since {call.since:.1f} s"
        yield f"    {_standing(call)}"
    yield from _below(graph, root, "    ", {root})


def _below(graph: WaitGraph, node: WaitNode, indent: str, above: set[WaitNode]) -> Iterator[str]:
    alike: dict[tuple[str, ...], list[Wait]] = defaultdict(list)
    for wait in sorted(graph.waits.get(node, ()), key=lambda wait: -wait.made.since):
        at = "" if wait.served is None else _standing(wait.served)
        own = str(wait.target) if wait.target in graph.waits else ""
        alike[(wait.made.worker, wait.made.function, wait.made.made_at, at, wait.why, own)].append(wait)
    for number, waits in enumerate(alike.values()):
        if number == _MOST_DRAWN:
            rest = sum(map(len, list(alike.values())[number:]))
            yield f"{indent}and for {rest} other calls"
            return
        first = waits[0]
        more = f", and for {len(waits) - 1} more such calls" if len(waits) > 1 else ""
        yield f"{indent}for {_made(first.made)}{more}"
        if first.made.made_at:
            yield f"{indent}    made at {first.made.made_at}"
        yield f"{indent}    {first.why if first.served is None else _standing(first.served)}"
        if first.target not in above:  # a handler may call its own caller
            yield from _below(graph, first.target, indent + "    ", above | {first.target})


def _made(call: SeenCall) -> str:
    return f"{call.function} on worker {call.worker!r}, since {call.since:.1f} s"


def _standing(call: SeenCall) -> str:
    if call.state == "queued":
        return "it is queued: it waits for a thread"
    if call.kind == "stream" and not (call.stands_at and not _WAITS.search(place_of(call))):
        return "it makes items, or waits until they are taken"
    if not call.stands_at:
        return "it is running"
    return f"it {'waits for a lock' if call.at_lock else 'stands'} at {place_of(call)}"


def place_of(call: SeenCall) -> str:
    """The innermost line of a handler outside of what it waits in, as `asyncio.sleep`; empty if it is not known."""
    at = call.stands_at[0] if call.stands_at else ""
    return next((line for line in call.stands_at if not _WAITS.search(line)), at)


def _short(line: str) -> str:
    """A line without the folders of its file."""
    return line.rpartition("/")[2]
