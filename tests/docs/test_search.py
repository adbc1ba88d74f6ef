"""The search of the site works in pages that are opened from a folder, and finds what people call things."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

from kvsim.report.screenshot import BROWSERS
from tests.docs.modules import DOCS, ROOT

BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
SETTINGS = (ROOT / "mkdocs.yml").read_text()
FOUND = re.compile(r'<a href="([^"]*)" class="md-search-result__link"')
WORDS = {
    "SSD": "questions/ssd.html",
    "NVMe": "questions/ssd.html",
    "how many GPUs": "questions/gpus.html",
    "LRU or not": "questions/lru.html",
    "is my simulation right": "questions/right.html",
}
"""What is looked for, and a page that must be among the first results."""
FIRST_RESULTS = 12


def test_the_site_has_a_search_without_a_server_or_another_site() -> None:
    """Material's offline plugin adds a script from another server, unless one of this name is listed."""
    script = re.search(r"polyfills:\n +- (\S*iframe-worker\S*)\n", SETTINGS)
    assert re.search(r"^plugins:\n  - search\n  - offline\n", SETTINGS, re.MULTILINE)
    assert script is not None and (DOCS / script[1]).is_file()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        pytest.skip("needs kvsim[docs]")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    return folder


@pytest.mark.long
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize("words", WORDS)
def test_a_page_opened_from_the_folder_finds(words: str, site: Path) -> None:
    address = f"{(site / 'index.html').as_uri()}?q={quote(words)}"
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=15000", "--dump-dom", address]
    page = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    results = [address.partition("?")[0] for address in FOUND.findall(page)]
    assert any(address.endswith(WORDS[words]) for address in results[:FIRST_RESULTS]), results[:FIRST_RESULTS]
