"""Paths as pages and tables show them: without the folders that lead there, which are nobody's business but their owner's."""

import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

END = r"\s,;:'\"\])}`"
ABSOLUTE = re.compile(rf"(?<![^\s=,:;'\"\[\](){{}}`])(?:file://)?~?/(?!/)(?:[^{END}/]+/)+(?=[^{END}/])")
"""The folders of an absolute path, or of one in somebody's home, that begins a word or a value."""
WHOLE = re.compile(r"~?/(?:[^/\n]+/)+([^/\n]+)/?")
"""A value that is such a path as a whole, blanks and all."""
SHORTENED = "Paths are shown without their folders, which result.json has."


def without_folders(text: str) -> str:
    """Return a text in which absolute paths are the names of their files: ``/home/someone/log.jsonl`` is ``log.jsonl``."""
    if "/" not in text:
        return text
    whole = WHOLE.fullmatch(text)
    return whole[1] if whole else ABSOLUTE.sub("", text)


def setting_without_folders(line: str) -> str:
    """Return ``key=value``, or another argument of a command, without folders."""
    name, is_set, value = line.partition("=")
    return f"{name}={without_folders(value)}" if is_set else without_folders(line)


def shown_command(command: str) -> str:
    """Return a command line whose arguments are without folders."""
    try:
        words = shlex.split(command)
    except ValueError:  # it was written by hand
        return without_folders(command)
    shown = [setting_without_folders(word) for word in words]
    return command if shown == words else shlex.join(shown)


def shortest(texts: Iterable[str]) -> dict[str, str]:
    """Return what to call each of several texts: absolute paths by the last parts that tell them apart, others as they are."""
    known = list(dict.fromkeys(texts))
    parts = {text: Path(text).parts[1:] for text in known if os.path.isabs(text)}
    for depth in range(1, max(map(len, parts.values()), default=0) + 1):
        found = {text: "/".join(parts[text][-depth:]) if text in parts else text for text in known}
        if len(set(found.values())) == len(known):
            return found
    return {text: text for text in known}


def shown_place(path: Path) -> str:
    """Return where a file is: from the current folder if it is inside, else its name and its folder's."""
    inside = os.path.relpath(path)
    return inside if not inside.startswith("..") or not path.is_absolute() else "/".join(path.parts[-2:])
