"""The pictures of the gallery: each has a command that its script can run, and those that are stored are small."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.docs.modules import DOCS, ROOT, load

examples = load("examples")
gallery = load("gallery")
PICTURES = gallery.pictures()
MOST_BYTES = 200 * 1024


def test_all_pictures_of_the_page_are_known() -> None:
    assert len(PICTURES) == gallery.GALLERY.read_text().count("\n![") == 12
    assert len({picture.name for picture in PICTURES}) == 12


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: str(picture.name))
def test_a_picture_is_there_with_its_command(picture: Any) -> None:
    assert picture.path.is_file()
    if picture.is_of_study:
        script = shlex.split(picture.command)[1]
        assert (ROOT / script).is_file() and Path(script).parent == picture.path.parent.relative_to(ROOT)
    else:
        assert picture.name in gallery.SIZES and picture.path.stat().st_size <= MOST_BYTES


def test_the_demo_is_what_make_runs() -> None:
    words = shlex.split(gallery.demo())
    assert words[:2] == ["kvsim", "simulate"] and "output=outputs/demo" in words and "placement=write_back" in words


def test_the_shadow_is_that_of_the_guide() -> None:
    [shown] = [picture.command for picture in PICTURES if picture.name == "shadow"]
    *_, run = gallery._until_shadow()
    assert shlex.split(run.replace("\\\n", " ")) == shlex.split(shown)


def test_a_name_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert gallery.main(["sweeps"]) == 2
    assert capsys.readouterr().err.startswith("no such picture: sweeps; choose from report, sweep, curve")


def test_commands_end_in_pages_of_their_own_folder() -> None:
    for picture in PICTURES:
        if not picture.is_of_study and picture.name not in ("report", "shadow"):
            words = shlex.split(picture.command)
            assert words[1] in gallery.PAGES and sum(word.startswith("output=") for word in words) == 1
    assert (DOCS / "gallery").is_dir()
