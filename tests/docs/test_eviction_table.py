"""The table of eviction policies has every policy, and its figures are those of the studies."""

import csv
import re

from tests.docs.modules import DOCS, ROOT, load

eviction_table = load("eviction_table")
POLICIES = sorted(path.stem for path in (ROOT / "conf" / "eviction").glob("*.yaml"))


def test_every_policy_has_a_row_with_advice_and_nothing_else_has() -> None:
    table = eviction_table.table(POLICIES, lambda name: f"paper of {name}")
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert [row[0] for row in rows] == [f"[`{name}`](#eviction-{name})" for name in POLICIES]
    assert all(len(row) == 5 and all(row) for row in rows)
    assert set(eviction_table.advice()) == set(POLICIES)


def test_results_are_differences_from_lru_in_points() -> None:
    with (ROOT / "experiments" / "lru_or_not" / "results.csv").open() as file:
        rates = {(row["trace"], row["policy"], row["pages"]): float(row["hit_rate"]) for row in csv.DictReader(file)}
    first, last = (100 * (rates["conversation", "mq", at] - rates["conversation", "lru", at]) for at in ("1000", "30000"))
    shown = eviction_table.result("mq")
    assert re.search(rf"\[Mooncake \{first:+.1f}, .*, \{last:+.1f}\]\(.*<br>\[synthetic ", shown), shown
    assert "knobs_flip" in shown and eviction_table.result("priority") == "not studied yet"


def test_the_studies_exist() -> None:
    for row in eviction_table.advice().values():
        if "study" in row:
            assert (ROOT / "experiments" / row["study"]["link"]).is_file()
    assert "generated: eviction_choice" in (DOCS / "reference" / "eviction.md").read_text()
