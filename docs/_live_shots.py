"""Pictures of the page and of `top` for README and guide, taken while a real group runs: `make live-shots`.

`python -m aiorpc.examples.actor_learner --chaos` runs meanwhile, whose actors are killed and return. The pictures go to
docs/_static. Wants Chromium, as `make testpage` does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from playwright.async_api import Browser, async_playwright

from aiorpc.observability.top import Top

CHROMIUM = "/usr/bin/chromium"
STATIC = Path(__file__).parent / "_static"
#: Name of the picture, width and height of the window, colours, and how much larger it is drawn.
PAGES = (
    ("dashboard-wide-light", 1280, 1310, "light", 1.0),
    ("dashboard-wide-dark", 1280, 1310, "dark", 1.0),
    ("dashboard-phone-light", 390, 844, "light", 1.5),
    ("dashboard-phone-dark", 390, 844, "dark", 1.5),
)
GROUP = (
    "-m",
    "aiorpc.examples.actor_learner",
    "--actors",
    "4",
    "--steps",
    "16",
    "--chaos",
    "12",
    "--solved",
    "501",
    "--updates",
    "100000",
)


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program, ended by an interrupt."""
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


def shrink(path: Path) -> None:
    """A third of the size: pages have few colours."""
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(128).save(path, optimize=True)


async def shoot(browser: Browser, url: str, whole: bool) -> None:
    """The pages side by side, each of which has seen the same. whole: also all of each page, not its beginning."""
    for name, width, height, colours, scale in PAGES:
        context = await browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if colours == "dark" else "light",
            device_scale_factor=scale,
        )
        page = await context.new_page()
        await page.goto(url)
        await page.wait_for_selector("#workers tbody tr[tabindex]")
        await page.wait_for_timeout(2500)
        await page.screenshot(path=STATIC / f"{name}.png")
        shrink(STATIC / f"{name}.png")
        if whole:
            await page.screenshot(path=Path("build") / f"{name}-whole.png", full_page=True)
            await page.click("#workers tbody tr[tabindex]")
            await page.wait_for_timeout(1500)
            await page.screenshot(path=Path("build") / f"{name}-worker.png")
        await context.close()


async def shoot_top(browser: Browser) -> None:
    """The terminal, as textual draws it."""
    app = Top("learner")
    async with app.run_test(size=(140, 26)) as pilot:
        await pilot.pause(4.0)
        drawn = app.export_screenshot(title="python -m aiorpc top")
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "top.svg"
        picture.write_text(drawn, encoding="utf-8")
        width, height = re.findall(r'viewBox="0 0 ([0-9.]+) ([0-9.]+)"', drawn)[0]
        page = await browser.new_page(viewport={"width": 1100, "height": round(1100 * float(height) / float(width))})
        await page.goto(picture.as_uri())
        await page.screenshot(path=STATIC / "top.png")
        shrink(STATIC / "top.png")


async def take(seconds: float, whole: bool) -> None:
    """All pictures, after the group has run for a while."""
    with running("-m", "aiorpc", "dashboard", "learner", "--port", "0") as dashboard, running(*GROUP):
        assert dashboard.stdout is not None
        url = dashboard.stdout.readline().strip()
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            watching = await browser.new_page()
            await watching.goto(url)  # looks are often while a page is open
            await asyncio.sleep(seconds)
            await shoot(browser, url, whole)
            await shoot_top(browser)
            await browser.close()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Takes pictures of the page and of top while actors are killed.")
    parser.add_argument("--seconds", type=float, default=90.0, help="for which the group runs before")
    parser.add_argument("--whole", action="store_true", help="also whole pages and a worker, into build/")
    given = parser.parse_args()
    Path("build").mkdir(exist_ok=True)
    asyncio.run(take(given.seconds, given.whole))


if __name__ == "__main__":
    main()
