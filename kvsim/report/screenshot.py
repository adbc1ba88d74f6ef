"""Takes screenshots of HTML pages, so that readers of a study see them without opening the page."""

import shutil
import subprocess
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def take_screenshot(page: Path, picture: Path, *, width: int, height: int) -> bool:
    """Write a PNG screenshot (``width`` x ``height`` pixels) of an HTML page. Returns False, writing none, without Chromium."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        return False
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000")
    target = f"--screenshot={picture.resolve()}"
    size = f"--window-size={width},{height}"
    subprocess.run([browser, *flags, size, target, page.resolve().as_uri()], check=True, capture_output=True)
    return True
