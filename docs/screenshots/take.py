"""The pictures in this folder: pages of finished runs in headless Chromium, light and dark.

    python docs/screenshots/take.py runs/demo/report.html comparison.html

The first page is a run's, made with `--show-text` or without; the second that of a comparison. Prints each picture's
size; `EXPUNGE_CHROMIUM` names the browser where it is not on the path.
"""

import os
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
WIDTH = 1100


def main() -> None:
    """Open, wait for the charts, take the parts."""
    run, comparison = (Path(argument).resolve().as_uri() for argument in sys.argv[1:3])
    browser = os.environ.get("EXPUNGE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        for scheme in ("light", "dark"):
            page = chromium.new_page(viewport={"width": WIDTH, "height": 760}, color_scheme=scheme)
            page.goto(run)
            page.wait_for_timeout(800)
            page.screenshot(path=HERE / f"top-{scheme}.png")
            page.locator("#tokens").screenshot(path=HERE / f"distributions-{scheme}.png")
            page.locator("#examples button.open").first.click()
            page.wait_for_timeout(300)
            row = page.locator("#table tbody tr").first
            row.scroll_into_view_if_needed()
            page.screenshot(path=HERE / f"example-{scheme}.png")
            page.goto(comparison)
            page.wait_for_timeout(800)
            page.screenshot(path=HERE / f"comparison-{scheme}.png")
            page.close()
        phone = chromium.new_page(viewport={"width": 400, "height": 800}, color_scheme="light")
        phone.goto(run)
        phone.wait_for_timeout(800)
        phone.screenshot(path=HERE / "phone.png")
        chromium.close()
    for file in sorted(HERE.glob("*.png")):
        print(f"{file.name}: {file.stat().st_size / 1000:.0f} kB")  # noqa: T201


if __name__ == "__main__":
    main()
