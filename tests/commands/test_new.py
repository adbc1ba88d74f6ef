"""``kvsim new`` in a scratch copy of the repository: what it writes works, and it overwrites nothing."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvsim.cli import main
from kvsim.commands.new import FAMILIES

ROOT = Path(__file__).resolve().parent.parent.parent
PARTS = ("kvsim", "policies", "kernels", "conf", "tests", "pyproject.toml")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository with one new policy of each family."""
    folder = tmp_path_factory.mktemp("copy")
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, folder / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / part)
    for family in FAMILIES:
        shown = kvsim(folder, "new", family, "brand_new")
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.splitlines()[0] == f"policies/{family}/brand_new.py"
    return folder


def kvsim(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from kvsim.cli import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, *words], cwd=folder, capture_output=True, text=True)


def test_the_new_tests_and_the_contracts_pass(copy: Path) -> None:
    new = [f"tests/policies/test_{family}_brand_new.py" for family in FAMILIES]
    families = ("eviction", "placement", "prefetch", "routing", "scheduling")
    contracts = [f"tests/policies/test_{family}.py" for family in families]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *new, *contracts]
    ran = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-2000:]


def test_the_new_files_are_in_the_style_of_the_others(copy: Path) -> None:
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if ruff is None:
        pytest.skip("ruff is not installed")
    new = [str(path.relative_to(copy)) for path in copy.rglob("*brand_new.py") if "kvsim" not in path.relative_to(copy).parts]
    assert len(new) == 2 * len(FAMILIES)
    for check in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
        ran = subprocess.run([ruff, *check, *new], cwd=copy, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout


def test_the_new_policies_run_by_their_names(copy: Path) -> None:
    tiers = ("tiers.gpu.capacity=6000pages", "tiers.cpu.capacity=9000pages", "tiers.disk.capacity=20000pages")
    names = ("eviction=brand_new", "placement=brand_new", "prefetch=brand_new")
    ran = kvsim(copy, "replay", "trace.sessions=20", *tiers, *names, "output=out")
    assert ran.returncode == 0, ran.stderr
    hybrid = ("model=nemotron_h_8b", "checkpoint=brand_new", "tiers.gpu.capacity=40GiB", "trace.sessions=20")
    ran = kvsim(copy, "replay", *hybrid, "output=out2")
    assert ran.returncode == 0, ran.stderr
    ran = kvsim(copy, "simulate", "trace.sessions=20", "scheduling=brand_new", "output=out3")
    assert ran.returncode == 0, ran.stderr
    assert kvsim(copy, "policies").stdout.count("brand_new") == len(FAMILIES)


def test_a_name_is_given_once(copy: Path) -> None:
    before = {path: path.read_bytes() for path in copy.rglob("*brand_new*")}
    shown = kvsim(copy, "new", "eviction", "brand_new")
    assert shown.returncode == 2
    assert shown.stderr == "kvsim: policies/eviction/brand_new.py already exists: choose another name than brand_new\n"
    assert {path: path.read_bytes() for path in copy.rglob("*brand_new*")} == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eviction", "lru"], "policies/eviction/lru.py already exists"),
        (["eviction", "MyPolicy"], "'MyPolicy' is not a valid policy name"),
        (["eviction", "2nd"], "'2nd' is not a valid policy name"),
        (["eviction", "a-b"], "'a-b' is not a valid policy name"),
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
