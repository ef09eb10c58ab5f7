"""Draws docs/_static/architecture.svg: `python docs/_ext/architecture.py`. A test says whether it is as drawn here."""

from __future__ import annotations

from pathlib import Path

PATH = Path(__file__).resolve().parent.parent / "_static" / "architecture.svg"
WIDTH, HEIGHT = 760, 470
# Legible on white and on black: the lines and letters are of a middle grey-blue, and areas are nearly transparent.
INK, ACCENT, FILL = "#71889f", "#2f7fb8", "#2f7fb81c"
PACKAGES = (
    (60, ("api, sync, Worker", "the verbs")),
    (130, ("fanout · publication · queues", "several workers, versions, items")),
    (200, ("caller", "calls made here")),
    (270, ("group · meeting", "who is a member")),
    (340, ("links · transport · channels", "messages; tensors beside them")),
)
SERVED = (
    (60, ("your functions", "loop, threads, batches, streams")),
    (130, ("references · gradients", "values that live here")),
    (200, ("callee", "calls that are served here")),
    (270, ("group · meeting", "who is a member")),
    (340, ("links · transport · channels", "messages; tensors beside them")),
)


def text(x: float, y: float, words: str, *, size: int = 13, bold: bool = False, color: str = INK) -> str:
    """Words around a point."""
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" text-anchor="middle"{weight}>{words}</text>'


def box(x: float, y: float, lines: tuple[str, str]) -> list[str]:
    """A package with its name and its purpose."""
    shape = f'<rect x="{x}" y="{y}" width="230" height="54" rx="6" fill="{FILL}" stroke="{INK}"/>'
    return [shape, text(x + 115, y + 23, lines[0], bold=True), text(x + 115, y + 42, lines[1], size=12)]


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """From one point to another."""
    return f'<path d="M{x1} {y1}L{x2} {y2}" stroke="{ACCENT}" stroke-width="1.6" marker-end="url(#head)"/>'


def drawing() -> str:
    """The picture as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="system-ui, sans-serif" fill="none">',
        "<title>A call from one worker to another</title>",
        '<defs><marker id="head" markerWidth="9" markerHeight="9" refX="7" refY="4" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{ACCENT}"/></marker></defs>',
        text(135, 38, "worker a: calls", size=15, bold=True),
        text(625, 38, "worker b: serves", size=15, bold=True),
    ]
    for x, packages in ((20, PACKAGES), (510, SERVED)):
        for y, lines in packages:
            parts += box(x, y, lines)
    for y in (114, 184, 254, 324):
        parts += [arrow(135, y, 135, y + 14), arrow(625, y + 14, 625, y + 1)]
    parts += [
        arrow(252, 358, 507, 358),
        arrow(508, 380, 253, 380),
        text(380, 350, "call: body and tensors", color=ACCENT),
        text(380, 398, "answer, error, item", color=ACCENT),
        text(380, 262, "on one host: unix socket,", size=12),
        text(380, 279, "shared memory, IPC of GPUs", size=12),
        text(380, 304, "between hosts: TCP or TLS", size=12),
        f'<rect x="285" y="425" width="190" height="34" rx="17" stroke="{INK}" stroke-dasharray="4 3"/>',
        text(380, 447, "store: where they meet"),
        f'<path d="M135 396V442H283M625 396V442H477" stroke="{INK}" stroke-dasharray="4 3"/>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PATH.write_text(drawing(), encoding="utf-8")
