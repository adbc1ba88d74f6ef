"""Compiled modules are used as a whole and of the sources beside them, or the run ends; how they are built."""

import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import kvsim
from kvsim import cli
from kvsim.errors import UsageError
from kvsim.installation import (
    RECORD,
    SHARED_LIBRARY,
    SUFFIX,
    StaleBuild,
    build_name,
    checksum,
    is_compiled,
    remove,
    source_of,
    write_record,
)
from kvsim.results.result import installed_versions

PACKAGE = Path(kvsim.__file__).resolve().parent
SOURCES = ("core/tree.py", "policies/eviction/lru.py")
NOT_SOURCES = shutil.ignore_patterns("*.so", RECORD, "__pycache__")
"""Files that a copy of the package leaves out, so that only what a test says is compiled."""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of two modules after a build: empty files stand for what a compiler makes."""
    package = tmp_path / "kvsim"
    for source in SOURCES:
        (package / source).parent.mkdir(parents=True)
        (package / source).write_text(f"# {source}\n")
        built(package, source).touch()
    (package / SHARED_LIBRARY).touch()
    write_record(package, {source: checksum(package / source) for source in SOURCES})
    return package


def built(package: Path, source: str) -> Path:
    return package / f"{source.removesuffix('.py')}{SUFFIX}"


def test_a_build_belongs_to_its_sources(package: Path) -> None:
    assert is_compiled(package)


def test_without_compiled_modules_it_is_pure_python(package: Path) -> None:
    for source in SOURCES:
        built(package, source).unlink()
    assert not is_compiled(package)


def test_a_changed_source_makes_the_build_stale(package: Path) -> None:
    (package / SOURCES[0]).write_text("# changed\n")
    with pytest.raises(StaleBuild, match=r"older than their sources \(core/tree.py\): run `make compiled`"):
        is_compiled(package)


def test_a_part_of_a_build_is_refused(package: Path) -> None:
    built(package, SOURCES[0]).unlink()
    with pytest.raises(StaleBuild, match=r"left over from another build \(core/tree.py"):
        is_compiled(package)


def test_a_module_of_another_build_is_refused(package: Path) -> None:
    built(package, "core/renamed.py").touch()
    with pytest.raises(StaleBuild, match=r"left over from another build \(core/renamed.py"):
        is_compiled(package)


@pytest.mark.parametrize("missing", [RECORD, SHARED_LIBRARY])
def test_what_all_modules_need_must_be_there(package: Path, missing: str) -> None:
    (package / missing).unlink()
    with pytest.raises(StaleBuild, match=re.escape(f"{Path(missing).name}, which ")):
        is_compiled(package)


def test_a_build_of_another_interpreter_is_not_seen(package: Path) -> None:
    for source in SOURCES:
        built(package, source).rename(package / f"{source}.cpython-399-other.so")
    assert not is_compiled(package)


def test_a_build_is_removed_whole(package: Path) -> None:
    remove(package)
    assert sorted(path.name for path in package.parent.rglob("*.*")) == ["lru.py", "tree.py"]


@pytest.mark.parametrize("module", ["kvsim.policies.prefetch.threshold", "kvsim.policies.eviction.lru", "kvsim.plans.plan"])
def test_the_source_of_a_module_is_found_whether_or_not_it_is_compiled(module: str) -> None:
    kind = {"threshold": "class Threshold", "lru": "class LRU", "plan": "class Plan"}[module.rpartition(".")[2]]
    assert kind in source_of(module).read_text()


def test_the_source_of_a_users_module_is_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_a_user.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    import_module("of_a_user")
    assert source_of("of_a_user") == tmp_path / "of_a_user.py"
    monkeypatch.delitem(sys.modules, "of_a_user")


def test_a_stale_build_is_a_mistake_and_a_failed_import() -> None:
    assert issubclass(StaleBuild, UsageError) and issubclass(StaleBuild, ImportError)


def test_the_command_line_says_so_in_one_line(package: Path) -> None:
    """As installed, but with a source that has changed since."""
    shutil.copytree(PACKAGE, package, dirs_exist_ok=True, ignore=NOT_SOURCES)
    for command in (["--version"], ["simulate", "trace=synthetic"]):
        ended = subprocess.run(
            [sys.executable, "-c", f"import sys; from kvsim.cli import main; sys.exit(main({command}))"],
            cwd=package.parent, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ended.returncode == 2 and ended.stdout == ""
        assert ended.stderr.startswith("kvsim: the compiled modules are older than their sources (core/tree.py")
        assert ended.stderr.count("\n") == 1


def test_versions_say_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.endswith(f", {build_name()}\n")
    assert installed_versions()["kvsim"].endswith(f" ({build_name()})")
