"""What mkdocs does beyond its configuration: fills in generated parts, takes results from ``experiments``, checks the site.

Nothing that is made here is stored in the repository.
"""

import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from offline import fetched
from reference import ROOT, fill

DRAWING = re.compile(r"^<!-- drawing: (\w+) -->$", re.MULTILINE)
NOTE = re.compile(r"^<!-- example: .*? -->\n", re.MULTILINE)
PARTS_OF_OTHERS = ("validation_drawn_findings.md",)
"""Documents in ``experiments`` that are also part of another one."""
DRAWINGS = Path(__file__).parent / "drawings"
SOURCES = ROOT / "build" / "docs-sources"
"""Where mkdocstrings reads kvsim, by mkdocs.yml."""
NOT_READ = ("__pycache__", "*.so", "*.yaml", "subclassing.py")
"""The last one defines a name twice, once for the compiler, which mkdocstrings does not take."""


def on_startup(**_: Any) -> None:
    """Make the folder before mkdocstrings looks for it."""
    SOURCES.mkdir(parents=True, exist_ok=True)


def on_pre_build(**_: Any) -> None:
    """Copy kvsim for mkdocstrings, which finds only folders with an ``__init__.py``, and no compiled modules."""
    shutil.rmtree(SOURCES, ignore_errors=True)
    package = shutil.copytree(ROOT / "kvsim", SOURCES / "kvsim", ignore=shutil.ignore_patterns(*NOT_READ))
    for folder in (path for path in package.rglob("*") if path.is_dir()):
        (folder / "__init__.py").touch()


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the results of the studies, with their pictures and tables, under ``studies``."""
    experiments = ROOT / "experiments"
    for path in sorted(experiments.glob("*/*")):
        if path.suffix in (".md", ".png", ".csv") and path.name not in PARTS_OF_OTHERS:
            name = path.relative_to(experiments).as_posix()
            files.append(File.generated(config, f"studies/{name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in drawings and generated parts."""
    markdown = NOTE.sub("", markdown)
    markdown = DRAWING.sub(lambda found: _drawing(found[1]), markdown)
    return fill(markdown)


def on_post_page(output: str, page: Any, **_: Any) -> None:
    """Refuse a page that fetches something from another server."""
    if found := fetched(output):
        raise PluginError(f"{page.file.src_uri} fetches from another server: {found}")


def _drawing(name: str) -> str:
    """A drawing as part of the page, so that it takes the page's colours."""
    text = (DRAWINGS / f"{name}.svg").read_text().strip()
    return f'<figure class="drawing">\n{text}\n</figure>'
