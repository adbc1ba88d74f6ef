"""Pages of routing, scheduling, autoscaling and admission have a row for each policy: what it does, knows, comes from, is for."""

import re

import pytest

from tests.docs.modules import DOCS, ROOT


@pytest.mark.parametrize("family", ["routing", "scheduling", "autoscaling", "admission"])
def test_every_policy_has_a_row(family: str) -> None:
    section = (DOCS / "reference" / f"{family}.md").read_text().split("## Which one")[1].split("<!--")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if line.startswith("| [")]
    names = sorted(path.stem for path in (ROOT / "conf" / family).glob("*.yaml"))
    assert sorted(re.sub(r"\[`(\w+)`\].*", r"\1", row[0]) for row in rows) == names
    assert sorted(row[0] for row in rows) == [f"[`{name}`](#{family}-{name})" for name in names]
    assert all(len(row) == 5 and row[1] and row[2] and row[4] for row in rows)
