"""``kvsim new FAMILY NAME``: creates a working policy to start from, with its settings and its test."""

import keyword
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from kvsim.errors import UsageError
from kvsim.files.writing import replacing
from kvsim.settings.catalog import FAMILIES
from kvsim.settings.sources import PROJECT, files_of, shown
from kvsim.suggest import closest

TEMPLATES = Path(__file__).resolve().parent / "templates"
"""A folder for each family, with the files to write for a policy named my_policy."""
ROOT = (Path(__file__).resolve().parent.parent / "policies").resolve().parent
"""The folder that contains policies, conf and tests."""
USAGE = """usage: kvsim new FAMILY NAME

Creates a working policy to start from: its class, its settings and its test. FAMILY is eviction, prefetch, placement,
checkpoint, routing, scheduling, autoscaling or admission. NAME, for example my_policy, is its name on the command line:
FAMILY=NAME. The files go into the folder kvsim_policies of the current folder, where every command finds them; in a clone of
kvsim, into that."""
FIRST_RUN = {
    "prefetch": "kvsim simulate tiers.cpu.capacity=100GiB tiers.disk.capacity=1TiB",
    "placement": "kvsim replay tiers.cpu.capacity=100GiB",
    "checkpoint": "kvsim replay model=nemotron_h_8b",
    "routing": "kvsim simulate cluster.engines=4",
    "scheduling": "kvsim simulate",
    "autoscaling": "kvsim simulate cluster.engines=4",
    "admission": "kvsim simulate",
}
"""What to try a new policy with, if not a replay."""
TESTS, CLONE_TESTS = ("pytest",), ("pytest", "hypothesis")
"""Packages that a new test needs; in a clone, with all that its tests share."""
IMPORTS = re.compile(r"((?:(?:import|from) (?:numpy|pytest).*\n)+)\n((?:(?:import|from) kvsim.*\n)+)")
"""Imports of installed packages, and of kvsim."""


def main(arguments: Sequence[str]) -> None:
    """Write the three files and print what to do next. Raises UsageError."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE)
        return
    if len(arguments) != 2:
        raise UsageError("use kvsim new FAMILY NAME, for example kvsim new eviction my_policy")
    family, name = arguments
    if family not in FAMILIES:
        hint = closest(family, FAMILIES) or f"; choose from {', '.join(FAMILIES)}"
        raise UsageError(f"there is no policy family {family!r}{hint}")
    check_name(name)
    is_clone = Path.cwd().is_relative_to(ROOT)
    root = ROOT if is_clone else Path.cwd()
    files = new_files(family, name) if is_clone else user_files(family, name)
    if is_clone:
        check_free(root, family, name, files)
    else:
        check_user_files_free(family, name, files)
        add_packages(root, family)
    write_new(root, files)
    print(*files, sep="\n")
    first_run = f"{FIRST_RUN.get(family, 'kvsim replay')} {family}={name}"
    print("next:", "; ".join([*installation(is_clone=is_clone), f"python -m pytest {list(files)[-1]}", first_run]))


def installation(*, is_clone: bool) -> list[str]:
    """Return the command that installs what the new test needs, if kvsim's Python lacks it: kvsim itself does not need that."""
    needed, install = (CLONE_TESTS, "pip install -e '.[test]'") if is_clone else (TESTS, "pip install pytest")
    return [] if all(map(find_spec, needed)) else [install]


def write_new(root: Path, files: dict[str, str]) -> None:
    """Write all of these new files or none. Raises UsageError."""
    try:
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            with replacing(root / path) as file:
                file.write(text.encode())
    except BaseException:
        for path in files:
            (root / path).unlink(missing_ok=True)
        raise


def check_name(name: str) -> None:
    """Raise UsageError unless the name works for a file and, in camel case, for a class."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name.endswith("_") or "__" in name:
        raise UsageError(f"{name!r} is not a valid policy name: use lower case and single underscores, for example my_policy")
    if keyword.iskeyword(name) or keyword.issoftkeyword(name) or name in ("base", "null"):
        raise UsageError(f"{name!r} is a reserved name: choose another one")


def check_free(root: Path, family: str, name: str, files: dict[str, str]) -> None:
    """Raise UsageError if one of the files already exists, or a folder for them does not."""
    for path in files:
        if not (root / path).parent.is_dir():
            raise UsageError(f"{(root / path).parent}: there is no such folder: run kvsim new in a clone of the repository")
        if (root / path).exists():
            raise UsageError(f"{path} already exists: choose another name than {name}")
    if (root / "policies" / family / f"{name}").exists():
        raise UsageError(f"the folder policies/{family}/{name} already exists: choose another name")


def check_user_files_free(family: str, name: str, files: dict[str, str]) -> None:
    """Raise UsageError if the user's project has one of the files, or any source a policy of that name."""
    if (path := files_of(family).get(name)) is not None:
        raise UsageError(f"{family}={name} already exists, in {shown(path)}: choose another name")
    if there := next((path for path in files if Path(path).exists()), None):
        raise UsageError(f"{there} already exists: choose another name than {name}")


def add_packages(root: Path, family: str) -> None:
    """Make the folders of the user's project packages, so that Python and pytest find what is in them."""
    for folder, purpose in ((root / PROJECT, "Policies of this project, found by kvsim."), (root / PROJECT / family, "")):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "__init__.py").exists():
            (folder / "__init__.py").write_text(f'"""{purpose}"""\n' if purpose else "")


def new_files(family: str, name: str) -> dict[str, str]:
    """Return the texts of the policy, its settings and its test, by their paths in the repository."""
    paths = (f"policies/{family}/{name}.py", f"conf/{family}/{name}.yaml", f"tests/policies/test_{family}_{name}.py")
    return dict(zip(paths, filled(family, name, "kvsim.policies"), strict=True))


def user_files(family: str, name: str) -> dict[str, str]:
    """Return the texts of the policy, its settings and its test, by their paths in a user's project."""
    names = (f"{family}/{name}.py", f"conf/{family}/{name}.yaml", f"{family}/test_{name}.py")
    return {f"{PROJECT}/{path}": text for path, text in zip(names, filled(family, name, PROJECT), strict=True)}


def filled(family: str, name: str, package: str) -> Iterator[str]:
    """Yield the texts of the policy, its settings and its test, if ``package`` has the folder of the family."""
    names = {
        "kvsim.commands.templates": package, "my_policy": name, "MyPolicy": "".join(map(str.capitalize, name.split("_")))
    }  # fmt: skip
    for file in ("my_policy.py", "my_policy.yaml", "test_my_policy.py"):
        text = (TEMPLATES / family / file).read_text()
        for word, filling in names.items():
            text = text.replace(word, filling)
        yield IMPORTS.sub(sorted_imports, text)


def sorted_imports(block: re.Match[str]) -> str:
    """Sort the imports of installed packages and of kvsim: in a user's project, kvsim is an installed package, too."""
    installed, ours = (lines.splitlines(keepends=True) for lines in block.groups())
    own = [line for line in ours if PROJECT in line]
    sections = [installed + [line for line in ours if line not in own], own] if own else [installed, ours]
    return "\n".join("".join(sorted(lines, key=lambda line: (line.startswith("from"), line))) for lines in sections)
