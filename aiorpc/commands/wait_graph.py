"""Draw who waits for whom in a group, from each program to the innermost handlers; name workers in a circle."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from ..observability import reader, wait_graph
from ..observability.reader import CannotLook


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="a worker of the group; the only group if left out")
    parser.add_argument("--mermaid", action="store_true", help="print a flowchart for mermaid in place of text")


def run(options: argparse.Namespace) -> int:
    """Print it. Returns 1 if workers wait in a circle, 2 if there is no such group here."""
    try:
        looks = reader.looks(partial(reader.group_of, options.name), reader.PAUSES[:1])
    except CannotLook as error:
        print(f"python -m aiorpc wait-graph: {error}", file=sys.stderr)
        return 2
    graph, around = wait_graph.build(looks[-1]), wait_graph.circle(looks[0], looks[-1])
    print(wait_graph.as_mermaid(graph) if options.mermaid else wait_graph.as_text(graph, around))
    for each in looks[-1].unseen:
        print(f"{'%% ' if options.mermaid else ''}not seen: {each.name}: {each.why}")
    return 1 if around else 0
