"""``kvsim new`` in a clone of the repository: what it writes works, and it overwrites nothing."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvsim.cli import main
from kvsim.commands import new
from kvsim.commands.new import FAMILIES

ROOT = Path(__file__).resolve().parent.parent.parent
PARTS = ("kvsim", "policies", "kernels", "conf", "tests", "pyproject.toml")


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folders of a clone with one new policy of each family."""
    for family in FAMILIES:
        for folder in (f"policies/{family}", f"conf/{family}", "tests/policies"):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    monkeypatch.setattr(new, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    for family in FAMILIES:
        assert main(["new", family, "brand_new"]) == 0
    return tmp_path


def test_the_new_files_are_in_the_style_of_the_others(clone: Path) -> None:
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if ruff is None:
        pytest.skip("ruff is not installed")
    files = [str(path.relative_to(clone)) for path in clone.rglob("*brand_new.py")]
    assert len(files) == 2 * len(FAMILIES) and "policies/eviction/brand_new.py" in files
    for check in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
        ran = subprocess.run([ruff, *check, *files], cwd=clone, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout


def test_a_name_is_given_once(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in clone.rglob("*brand_new*")}
    assert main(["new", "eviction", "brand_new"]) == 2
    expected = "kvsim: policies/eviction/brand_new.py already exists: choose another name than brand_new\n"
    assert capsys.readouterr().err == expected
    assert {path: path.read_bytes() for path in clone.rglob("*brand_new*")} == before


@pytest.mark.parametrize("installed", [True, False])
def test_what_to_do_next_works_with_what_is_installed(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(new, "find_spec", lambda name: name if installed else None)
    assert main(["new", "eviction", "my_policy"]) == 0
    pip = "" if installed else "pip install pytest; "
    expected = f"next: {pip}python -m pytest kvsim_policies/eviction/test_my_policy.py; kvsim replay eviction=my_policy"
    assert capsys.readouterr().out.splitlines()[-1] == expected


@pytest.mark.long
def test_the_new_tests_and_the_contracts_pass_in_a_copy_of_the_repository(tmp_path: Path) -> None:
    """``tests/settings/test_sources.py`` runs the new tests for every change."""
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, tmp_path / part, **({"symlinks": True} if copy is shutil.copytree else {}))
    code = "import sys; from kvsim.cli import main; sys.exit(main())"
    for family in FAMILIES:
        subprocess.run([sys.executable, "-c", code, "new", family, "brand_new"], cwd=tmp_path, check=True)
    tests = [f"tests/policies/test_{family}_brand_new.py" for family in FAMILIES]
    tests += [f"tests/policies/test_{family}.py" for family in FAMILIES if family != "checkpoint"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-2000:]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eviction", "MyPolicy"], "'MyPolicy' is not a valid policy name"),
        (["eviction", "../x"], "'../x' is not a valid policy name"),
        (["eviction", "class"], "'class' is a reserved name"),
        (["eviction", "base"], "'base' is a reserved name"),
        (["evicton", "mine"], "there is no policy family 'evicton'; did you mean eviction?"),
        (["eviction"], "use kvsim new FAMILY NAME"),
    ],
)
def test_a_mistake_ends_with_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", *words]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"kvsim: {message}")
    assert shown.err.count("\n") == 1
