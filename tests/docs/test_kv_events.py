"""The page on KV events names every encoding, with the fields that it has."""

import re

from kvsim.kv_events.dialects import DIALECTS
from tests.docs.modules import DOCS

PAGE = (DOCS / "reference" / "kv_events.md").read_text()


def test_the_page_has_the_encodings_and_their_fields() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| `")]
    told = {name.strip("`"): (versions, kind, fields) for name, versions, kind, fields in (row for row in rows if len(row) == 4)}
    assert [(name, versions) for name, (versions, _, _) in told.items()] == [
        (name, one.versions) for name, one in DIALECTS.items()
    ]
    before: tuple[str, ...] = ()
    for name, dialect in DIALECTS.items():
        _, kind, text = told[name]
        assert kind.startswith("maps") == dialect.as_maps
        if upto := re.match(r"the same up to (\w+)", text):
            assert dialect.stored == before[: before.index(upto[1]) + 1]
        else:
            assert text == ", ".join(dialect.stored)
        before = dialect.stored
