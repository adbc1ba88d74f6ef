"""Takes the pictures of the gallery from the commands beside them, in a Chromium.

``python docs/gallery.py`` takes those of pages, ``python docs/gallery.py NAME...`` those named: by file (``sweep``) or by study
(``lru_or_not``). Studies write their pictures themselves and take minutes to hours, so each must be named.
"""

import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import examples

from kvsim.report.screenshot import take_screenshot

DOCS, ROOT = examples.DOCS, examples.ROOT
GALLERY = DOCS / "gallery.md"
SECTION = re.compile(r"^!\[[^\]]*\]\((?P<picture>\S+)\)\n\n```(?:sh|console)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
DEMO = re.compile(r"^demo:.*\n(?P<recipe>(?:\t.*\n)+)", re.MULTILINE)
WATCHED = DOCS / "guides" / "shadow.md"
"""The guide whose first example has the server and the clients of the picture of a shadow."""
PAGES = {"replay": "report.html", "simulate": "report.html", "curve": "curve.html", "saturate": "saturate.html"}
"""The page that each command writes into its output folder."""
SIZES = {"report": (1060, 1009), "sweep": (1100, 835), "curve": (1000, 1015), "saturate": (1000, 960), "shadow": (1100, 1075)}
"""Width and height of what is shown of a page: it ends below a table or a picture."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture of the gallery, and the command below it."""

    path: Path
    command: str

    @property
    def name(self) -> str:
        """Its file's name; of a study, the study's."""
        return self.path.parent.name if self.is_of_study else self.path.stem

    @property
    def is_of_study(self) -> bool:
        return DOCS not in self.path.parents


def pictures() -> list[Picture]:
    """Return the pictures of the gallery, in its order."""
    return [_picture(found) for found in SECTION.finditer(GALLERY.read_text())]


def _picture(found: re.Match[str]) -> Picture:
    place = found["picture"]
    path = ROOT / "experiments" / place.removeprefix("studies/") if place.startswith("studies/") else DOCS / place
    first, *_ = found["text"].replace("\\\n", " ").splitlines()
    return Picture(path=path, command=" ".join(first.removeprefix("$ ").split()))


def demo() -> str:
    """Return the command that ``make demo`` runs."""
    found = DEMO.search((ROOT / "Makefile").read_text())
    assert found is not None, "the Makefile has no demo"
    return " ".join(found["recipe"].replace("\\\n", " ").replace("$(BIN)/", "").split())


def take(picture: Picture) -> None:
    """Run the command of a picture and take it anew. Raises OSError without a Chromium."""
    if picture.is_of_study:
        subprocess.run([sys.executable, *shlex.split(picture.command)[1:]], cwd=ROOT, check=True)
        return
    with tempfile.TemporaryDirectory() as place:
        page = _watched(Path(place)) if picture.name == "shadow" else _written(picture, Path(place))
        width, height = SIZES[picture.name]
        if not take_screenshot(page, picture.path, width=width, height=height):
            raise FileNotFoundError("no Chromium is installed, which takes the pictures")


def _written(picture: Picture, folder: Path) -> Path:
    """Run a command. Returns its page."""
    command = demo() if picture.command == "make demo" else picture.command
    root = examples.prepare(GALLERY, folder)
    examples.run_command(command, folder, root)
    words = shlex.split(command)
    output = next(word.removeprefix("output=") for word in words if word.startswith("output="))
    return folder / output / PAGES[words[1]]


def _watched(folder: Path) -> Path:
    """Run the guide's example of a shadow up to its end. Returns the page."""
    root = examples.prepare(WATCHED, folder)
    for step in _until_shadow():
        examples.run_command(step, folder, root)
    return next(folder.glob("*/shadow.html"))


def _until_shadow() -> Iterator[str]:
    for chain in examples.chains(WATCHED):
        for step in (step for block in chain for step in examples.steps(block)):
            yield step.command
            if step.command.startswith("kvsim shadow"):
                return


def main(names: Sequence[str]) -> int:
    """Take the pictures of these names, or those of all pages."""
    known = {picture.name: picture for picture in pictures()}
    if unknown := [name for name in names if name not in known]:
        print(f"no such picture: {', '.join(unknown)}; choose from {', '.join(known)}", file=sys.stderr)
        return 2
    for picture in [known[name] for name in names] or [one for one in known.values() if not one.is_of_study]:
        print(f"{picture.name}: {picture.command}", flush=True)
        take(picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
