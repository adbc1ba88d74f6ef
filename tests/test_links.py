"""A checkout without symbolic links says what is wrong and how to mend it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvsim.installation import LINKED, PACKAGE, BrokenCheckout, check_links


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The package as git writes it without symbolic links: each link is a file that holds its target."""
    package = tmp_path / "kvsim"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns(*LINKED, "*.so", "compiled.*.txt", "__pycache__"))
    for name in LINKED:
        (package / name).write_text(f"../{name}")
    return tmp_path


def test_this_checkout_has_its_links() -> None:
    check_links()
    assert all((PACKAGE / name).is_dir() for name in LINKED)


def test_files_in_the_place_of_links_are_an_import_error_that_says_what_to_do(checkout: Path) -> None:
    with pytest.raises(BrokenCheckout, match=r"kvsim/policies is not a symbolic link.*git config core\.symlinks true") as caught:
        check_links(checkout / "kvsim")
    assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize("arguments", [("replay", "output=out"), ("--help",)], ids=["replay", "help"])
def test_a_command_ends_with_one_line(checkout: Path, arguments: tuple[str, ...]) -> None:
    code = "import sys; from kvsim.cli import main; sys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=checkout, env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith("kvsim: kvsim/policies is not a symbolic link") and ended.stderr.count("\n") == 1


def test_the_python_api_says_the_same(checkout: Path) -> None:
    command = [sys.executable, "-c", "import kvsim; kvsim.replay"]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    ended = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "BrokenCheckout: kvsim/policies is not a symbolic link" in ended.stderr.splitlines()[-1]
