"""The files about the project agree with each other, and the package says that it is typed."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import kvsim
from kvsim.installation import PACKAGE

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_the_same_everywhere() -> None:
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert cited and newest
    assert cited[1] == newest[1] == PROJECT["version"] == version("kvsim") == kvsim.__version__


def test_the_package_is_typed_and_says_so() -> None:
    assert (PACKAGE / "py.typed").is_file()
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert "py.typed" in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]


def test_a_script_beside_a_clone_imports_the_package_not_the_clone(tmp_path: Path) -> None:
    clone, site = tmp_path / "kvsim", tmp_path / "site"
    for name in ("kvsim", "policies", "kernels", "conf"):
        shutil.copytree(ROOT / name, clone / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    site.mkdir()
    build = f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})"
    subprocess.run(
        [sys.executable, "-c", build], cwd=clone, check=True, capture_output=True, env=os.environ | {"KVSIM_COMPILE": "0"}
    )
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    (tmp_path / "script.py").write_text(f"import site; site.addsitedir({str(site)!r}); import kvsim; print(kvsim.__file__)")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [sys.executable, "-S", "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == str(clone / "kvsim" / "__init__.py")


def test_every_supported_python_is_tested_and_has_a_wheel() -> None:
    supported = {name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)}
    tested = re.search(r"python: (\[.*\])", (ROOT / ".github/workflows/tests.yml").read_text())
    builds = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]["build"]
    assert tested and supported == set(json.loads(tested[1])) == {f"3.{build[3:5]}" for build in builds}
    assert PROJECT["requires-python"] == f">={min(supported, key=lambda name: int(name.split('.')[1]))}"


def test_containers_run_the_demo() -> None:
    assert 'CMD ["make", "demo"]' in (ROOT / "Dockerfile").read_text()
    assert "make demo" in json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())["postCreateCommand"]


def test_links_of_the_project_name_one_repository() -> None:
    source = PROJECT["urls"]["Source"]
    assert PROJECT["urls"]["Changelog"].startswith(source) and PROJECT["urls"]["Issues"].startswith(source)
    assert f"repository-code: {source}\n" in (ROOT / "CITATION.cff").read_text()
