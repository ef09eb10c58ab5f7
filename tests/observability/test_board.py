"""The Grafana board shows the metrics that there are."""

from __future__ import annotations

import json

from aiorpc.observability.measures import HISTOGRAM, MEASURES
from tests.observability.board import PATH, metrics_of, queries


def test_the_board_shows_every_metric_and_no_other() -> None:
    """Each is in a query; each query names only metrics that workers have."""
    shown = {name for _, query in queries() for name in metrics_of(query) if not name.startswith("process_")}
    parts = {
        part: measure.name
        for measure in MEASURES
        for part in (
            [f"{measure.name}_{x}" for x in ("bucket", "count", "sum")] if measure.kind == HISTOGRAM else [measure.name]
        )
    }
    assert shown <= set(parts)
    assert {parts[name] for name in shown} == {measure.name for measure in MEASURES}


def test_panels_lie_beside_each_other() -> None:
    """None covers another one, and each has a title and a number of its own."""
    panels = json.loads(PATH.read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    covered: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not covered & cells and max(x for x, _ in cells) < 24, panel["title"]
        covered |= cells
