"""``kvsim new FAMILY NAME``: creates a working policy to start from, with its settings and its test."""

import keyword
import re
from collections.abc import Sequence
from pathlib import Path

from kvsim.commands import templates
from kvsim.errors import UsageError
from kvsim.suggest import closest

FAMILIES = {
    "eviction": templates.EVICTION,
    "prefetch": templates.PREFETCH,
    "placement": templates.PLACEMENT,
    "checkpoint": templates.CHECKPOINT,
    "routing": templates.ROUTING,
    "scheduling": templates.SCHEDULING,
}
ROOT = (Path(__file__).resolve().parent.parent / "policies").resolve().parent
"""The folder that contains policies, conf and tests."""
USAGE = """usage: kvsim new FAMILY NAME

Creates a working policy to start from: its class, its settings in conf, and its test. FAMILY is eviction, prefetch,
placement, checkpoint, routing or scheduling. NAME, for example my_policy, is its name on the command line: FAMILY=NAME. Works
only in a clone of the repository."""
FIRST_RUN = {
    "prefetch": "kvsim simulate",
    "routing": "kvsim simulate cluster.engines=4",
    "scheduling": "kvsim simulate",
}
"""What to try a new policy with, if not a replay."""


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
    files = new_files(family, name)
    check_free(ROOT, family, name, files)
    for path, text in files.items():
        (ROOT / path).write_text(text)
        print(path)
    print(f"next: pytest {list(files)[-1]}; {FIRST_RUN.get(family, 'kvsim replay')} {family}={name}")


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


def new_files(family: str, name: str) -> dict[str, str]:
    """Return the texts of the policy, its settings and its test, by their paths in the repository."""
    code, settings, test = FAMILIES[family]
    words = name.split("_")
    names = {"@name@": name, "@Class@": "".join(word.capitalize() for word in words), "@words@": " ".join(words)}
    paths = (f"policies/{family}/{name}.py", f"conf/{family}/{name}.yaml", f"tests/policies/test_{family}_{name}.py")
    return {path: _filled(text, names) for path, text in zip(paths, (code, settings, test), strict=True)}


def _filled(text: str, names: dict[str, str]) -> str:
    for mark, name in names.items():
        text = text.replace(mark, name)
    ours = r"(?:from kvsim\..*\n)+"
    return re.sub(ours, lambda lines: "".join(sorted(lines[0].splitlines(keepends=True))), text.lstrip("\n"))
