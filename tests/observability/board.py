"""The Grafana board, and the queries in it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.pages import DOCS

PATH: Path = DOCS / "_static" / "grafana.json"
#: What Grafana puts in place of its variables.
VALUES = {"$worker": ".*", "$__rate_interval": "10s"}


def queries() -> list[tuple[str, str]]:
    """Title of the panel, and query, with values for the variables. Fails if one is left."""
    found: list[tuple[str, str]] = []
    for panel in json.loads(PATH.read_text(encoding="utf-8"))["panels"]:
        for target in panel.get("targets", ()):
            query = str(target["expr"])
            for variable, value in VALUES.items():
                query = query.replace(variable, value)
            assert "$" not in query, query
            found.append((str(panel["title"]), query))
    return found


def metrics_of(query: str) -> set[str]:
    """The names of metrics in a query."""
    return set(re.findall(r"\b(?:aiorpc|rpc|process)_\w+(?=[{\[ ]|$)", re.sub(r"\{[^}]*\}", "{", query)))
