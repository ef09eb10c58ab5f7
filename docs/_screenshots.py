"""Pictures of the built site, to be looked at: `make docs-shots`, which wants Chromium and `make docs` before it.

Each page is taken wide and narrow, light and dark, into build/shots. Chromium may not reach any other host meanwhile:
what a page would ask of the network is missing in the picture.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BUILT = Path("build/docs")
SHOTS = Path("build/shots")
PAGES = (
    "index",
    "start/groups",
    "howto/actor_learner",
    "reference/index",
    "reference/verbs",
    "reference/worker",
    "reference/options",
    "reference/errors",
    "reference/statistics",
    "reference/rights",
    "inside/index",
    "inside/architecture",
)
WIDTHS = {"wide": 1400, "narrow": 420}
HEIGHT = 1800
#: furo goes by what the system prefers, which Chromium is told so.
THEMES = {"light": (), "dark": ("--blink-settings=preferredColorScheme=0",)}


def chromium() -> str:
    """The browser. SystemExit if there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    sys.exit("docs-shots wants Chromium: apt-get install chromium")


def shoot(browser: str, page: Path, width: int, flags: tuple[str, ...], picture: Path) -> None:
    """One picture. A window is no narrower than 500 pixels: a narrow page stands in a frame."""
    with tempfile.TemporaryDirectory() as folder:
        target = page.resolve().as_uri()
        if width < 500:
            frame = Path(folder) / "frame.html"
            style = f"width:{width}px;height:{HEIGHT}px;border:0"
            frame.write_text(f'<body style="margin:0"><iframe src="{target}" style="{style}"></iframe>')
            target = frame.as_uri()
        command = [
            browser,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--allow-file-access-from-files",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={folder}/profile",
            f"--window-size={max(width, 500)},{HEIGHT}",
            "--virtual-time-budget=3000",
            f"--screenshot={picture.resolve()}",
            *flags,
            target,
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=60)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Takes pictures of the built site, wide and narrow, light and dark.")
    parser.add_argument("pages", nargs="*", default=PAGES, help="which pages, without .html")
    parser.add_argument("--built", type=Path, default=BUILT)
    parser.add_argument("--shots", type=Path, default=SHOTS)
    given = parser.parse_args()
    given.shots.mkdir(parents=True, exist_ok=True)
    browser = chromium()
    for page in given.pages:
        for form, width in WIDTHS.items():
            for theme, flags in THEMES.items():
                picture = given.shots / f"{page.replace('/', '-')}-{form}-{theme}.png"
                shoot(browser, given.built / f"{page}.html", width, flags, picture)
                print(picture)


if __name__ == "__main__":
    main()
