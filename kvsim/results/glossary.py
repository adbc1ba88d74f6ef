"""What fields and columns of a run's files mean, as plain text: for ``kvsim help``."""

import re
from collections.abc import Iterator

from kvsim.engine.columns import COLUMNS
from kvsim.hardware.tier_kinds import ALWAYS
from kvsim.results.fields import FIELDS

FILES = ("result.json", "requests.csv.gz")
LINK = re.compile(r"\[(.+?)\]\(.+?\)")


def meanings(topic: str) -> list[tuple[str, str]]:
    """Return names and meanings of what is in a file, or of the fields and columns of a name; none if nothing is called so.

    Of a word such as ``hit``, they are those of the fields of ``result.json`` whose names begin with it.
    """
    rows = list(_rows())
    found = [(name, meaning) for file, name, meaning in rows if topic == file or topic in name.split(", ")]
    begun = [(name, meaning) for file, name, meaning in rows if file == FILES[0] and name.startswith(f"{topic}_")]
    return found or begun


def _rows() -> Iterator[tuple[str, str, str]]:
    for row in FIELDS:
        yield FILES[0], row.name, _plain(row.meaning)
    for column in COLUMNS:
        yield FILES[1], ", ".join(column.headings(ALWAYS)), _plain(f"{column.meaning} ({column.kind_name})")


def _plain(markdown: str) -> str:
    return LINK.sub(r"\1", markdown).replace("`", "")
