"""A trace file that is given without its key: ``kvsim simulate FILE``."""

import os
from collections.abc import Sequence

from kvsim.errors import UsageError
from kvsim.settings.configuration import quoted

PATH = "trace.path"
STANDARD_INPUT = "-"


def with_bare_file(words: Sequence[str]) -> list[str]:
    """Return the overrides, a bare file among them as ``trace.path=FILE``.

    Raises UsageError for two files, and for one that is not there.
    """
    bare = [word for word in words if is_file(word) or is_path(word)]
    if missing := next((word for word in bare if not is_file(word)), None):
        what = "is a folder" if os.path.isdir(missing) else "there is no such file"
        raise UsageError(f"{missing}: {what}; give a trace file, or settings as KEY=VALUE")
    named = [word for word in words if word.partition("=")[0] == PATH]
    if len(bare) + len(named) > 1 and bare:
        both = " and ".join([*bare, *named])
        raise UsageError(f"{both}: a run has one trace; to compare several, run kvsim with -m and {PATH}=A,B")
    return [f"{PATH}={word if word == STANDARD_INPUT else quoted(word)}" if word in bare else word for word in words]


def is_file(word: str) -> bool:
    """Whether a word of a command line is a file, or standard input, rather than a setting."""
    return word == STANDARD_INPUT or "=" not in word and os.path.isfile(word)


def is_path(word: str) -> bool:
    """Whether a word looks like the path of a trace, whether or not a file is there."""
    is_named_so = os.sep in word or word.endswith((".json", ".jsonl", ".gz", ".zst", ".csv"))
    return "=" not in word and (is_named_so or os.path.isdir(word))
