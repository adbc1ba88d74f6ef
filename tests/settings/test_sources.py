"""Policies that lie outside kvsim: in the user's project, in an installed package, in a folder named on the command line."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvsim
from kvsim.cli import main
from kvsim.commands.new import FAMILIES
from kvsim.settings.sources import files_of, set_up

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = ("trace.sessions=4", "tiers.gpu.capacity=900pages")
POLICY = '''
from dataclasses import dataclass
from kvsim.policies.eviction.lru import LRU

@dataclass(kw_only=True, eq=False)
class Own(LRU):
    """Keeps what {package} was told to keep."""
    weight: int = 3
'''


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of a user, which is the current one; what is imported from it is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("kvsim_policies", "offered", "beside"):
            del sys.modules[name]
    monkeypatch.undo()
    set_up([])


def write(folder: Path, package: str, name: str = "own") -> Path:
    """Write an eviction policy and its YAML into a package of this name below the folder. Returns the class's file."""
    code, conf = folder / package / "eviction", folder / package / "conf" / "eviction"
    for path in (code, conf):
        path.mkdir(parents=True, exist_ok=True)
    for path in (folder / package, code):
        (path / "__init__.py").touch()
    (code / f"{name}.py").write_text(POLICY.format(package=package))
    (conf / f"{name}.yaml").write_text(f"_target_: {package}.eviction.{name}.Own\nweight: 3\n")
    return code / f"{name}.py"


def install(site: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that pip has installed a package that offers its policies."""
    info = site / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kvsim.policies]\nours = {package}\n")
    monkeypatch.syspath_prepend(site)


def record(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def test_every_command_finds_the_projects_policies(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(project, "kvsim_policies")
    assert main(["replay", *SMALL, "eviction=own", "output=one"]) == 0
    assert record(project / "one")["choices"]["eviction"] == "own"
    assert main(["simulate", *SMALL, "eviction=own", "output=two"]) == 0
    assert main(["curve", SMALL[0], "curve.policies=[own]", "curve.capacities=[2000]", "output=three"]) == 0
    assert main(["report", "one", "two"]) == 0
    capsys.readouterr()
    assert main(["policies"]) == 0
    listed = capsys.readouterr().out
    assert listed.index("own") < listed.index("arc") and "Keeps what" in listed


@pytest.mark.long
def test_workers_of_a_launcher_find_them(project: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    loky = pytest.importorskip("joblib.externals.loky")
    loky.get_reusable_executor().shutdown(wait=True)  # workers of an earlier test have its current folder
    write(project, "kvsim_policies")
    assert main(["replay", "-m", "hydra/launcher=joblib", *SMALL, "eviction=own,lru", "output=out"]) == 0
    assert [record(project / "out" / job)["choices"]["eviction"] for job in "01"] == ["own", "lru"]


def test_python_finds_them(project: Path) -> None:
    write(project, "kvsim_policies")
    trace = kvsim.load_trace("synthetic", sessions=4)
    own = kvsim.replay(trace, SMALL[1], "eviction=own", "eviction.weight=5")
    assert own.record["config"]["eviction"]["weight"] == 5
    assert own.hit_rate == kvsim.replay(trace, SMALL[1], "eviction=lru").hit_rate


def test_a_packages_entry_point_offers_its_policies(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project / "site", "offered")
    install(project / "site", "offered", monkeypatch)
    assert files_of("eviction")["own"] == project / "site" / "offered" / "conf" / "eviction" / "own.yaml"
    assert main(["replay", *SMALL, "eviction=own", "output=out"]) == 0
    assert record(project / "out")["config"]["eviction"]["_target_"] == "offered.eviction.own.Own"


def test_an_entry_point_without_settings_is_named(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(project / "site", "offered", monkeypatch)
    assert main(["policies"]) == 2
    line = "kvsim: the entry point ours of kvsim.policies: offered is not a package with a folder conf\n"
    assert capsys.readouterr().err == line


def test_a_folder_of_settings_may_be_named(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(project / "elsewhere", "beside")
    folder = project / "elsewhere" / "beside" / "conf"
    assert main(["policies", "--config-dir", str(folder)]) == 0
    assert main(["replay", f"--config-dir={folder}", *SMALL, "eviction=own", "output=out"]) == 0
    assert record(project / "out")["command_line"].startswith(f"kvsim replay --config-dir {folder} trace.sessions=4")
    assert main(["report", "out", "--config-dir", str(folder)]) == 0
    assert main(["replay", "--config-dir", "nowhere"]) == 2
    assert capsys.readouterr().err.endswith("kvsim: --config-dir: there is no folder 'nowhere'\n")


@pytest.mark.parametrize("command", [["replay", "eviction=lru"], ["policies"]])
def test_two_policies_of_one_name_are_an_error(command: list[str], project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(project, "kvsim_policies", "lru")
    assert main(command) == 2
    line = f"kvsim: eviction=lru is defined twice, in kvsim_policies/conf/eviction/lru.yaml and {ROOT}/"
    assert capsys.readouterr().err.startswith(line)


def test_a_run_is_repeated_when_the_policy_or_what_it_imports_changes(project: Path) -> None:
    code = write(project, "kvsim_policies")
    helper = project / "kvsim_policies" / "scores.py"
    helper.write_text("WEIGHT = 1\n")
    code.write_text(f"from kvsim_policies import scores\nfrom ..scores import WEIGHT\n{code.read_text()}")
    command = "import sys; from kvsim.cli import main; sys.exit(main())"

    def config_hash() -> str:
        run = [sys.executable, "-P", "-c", command, "replay", *SMALL, "eviction=own", "output=out"]
        subprocess.run(run, check=True, capture_output=True, env={"PYTHONPATH": str(ROOT)})
        return str(record(project / "out")["config_hash"])

    first = config_hash()
    helper.write_text("WEIGHT = 2\n")
    second = config_hash()
    code.write_text(code.read_text() + "\n")
    assert len({first, second, config_hash()}) == 3


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = (\n", "cannot be imported: SyntaxError: '(' was never closed (own.py, line 1)"),
        ("import no_such_module\n", "needs the module no_such_module, which is not installed"),
        ("", "does not exist; choose by name, eviction=NAME, or set it to a subclass of EvictionPolicy"),
    ],
)
def test_a_broken_file_is_named(text: str, problem: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(project, "kvsim_policies").write_text(text)
    assert main(["replay", *SMALL, "eviction=own"]) == 2
    assert capsys.readouterr().err == f"kvsim: eviction._target_: kvsim_policies.eviction.own.Own {problem}\n"


def test_a_folder_that_is_no_package_is_not_imported(project: Path) -> None:
    write(project, "kvsim_policies")
    (project / "some_folder").mkdir()
    set_up([])
    with pytest.raises(ModuleNotFoundError):
        __import__("some_folder")


def test_new_policies_lie_in_the_project_and_pass_their_tests(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for family in FAMILIES:
        assert main(["new", family, "brand_new"]) == 0
        assert capsys.readouterr().out.startswith(f"kvsim_policies/{family}/brand_new.py\n")
    small = ("trace.sessions=4", "tiers.gpu.capacity=900pages", "tiers.cpu.capacity=9000pages", "tiers.disk.capacity=9000pages")
    names = [f"{family}=brand_new" for family in ("eviction", "placement", "prefetch", "scheduling")]
    assert main(["simulate", *small, *names, "output=out"]) == 0
    assert main(["new", "eviction", "brand_new"]) == 2
    assert main(["new", "eviction", "lru"]) == 2
    assert capsys.readouterr().err.count("already exists, in") == 2
    tests = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "kvsim_policies"]
    ran = subprocess.run(tests, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert ran.returncode == 0, ran.stdout[-2000:]
    if ruff := shutil.which("ruff", path=str(Path(sys.executable).parent)):
        checked = subprocess.run([ruff, "check", "--isolated", "--select=E,F,I,UP,B", "--ignore=E501", "--no-cache", "."])
        assert checked.returncode == 0
