"""What the pages show is what happens: every example is run, links lead somewhere, and the reference is complete."""

import csv
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvsim
from kvsim.cli import COMMANDS
from kvsim.settings import catalog
from tests.docs.modules import DOCS, ROOT, load

examples = load("examples")
offline = load("offline")
reference = load("reference")
PAGES = examples.pages()
FIRST = (DOCS / "quickstart.md",)
"""The page whose examples are run for every change; ``make test-long`` runs those of all pages."""
SITE = [page for page in PAGES if DOCS in page.parents]
CONSOLE = [
    pytest.param(chain, id=chain[0].name, marks=[pytest.mark.long] if chain[0].is_long or page not in FIRST else [])
    for page in PAGES
    for chain in examples.chains(page)
]


@pytest.mark.parametrize("chain", CONSOLE)
def test_a_command_prints_what_its_page_shows(chain: Any, tmp_path: Path) -> None:
    if reason := chain[0].skip_reason:
        pytest.skip(reason)
    root = examples.prepare(chain[0].page, tmp_path)
    for step in (step for block in chain for step in examples.steps(block)):
        found = examples.difference(step.shown, examples.run_command(step.command, tmp_path, root))
        assert found is None, f"$ {step.command}\n{found}"


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=str(page.relative_to(ROOT)), marks=[] if page in FIRST else [pytest.mark.long])
        for page in PAGES
        if examples.python_blocks(page)
    ],
)
def test_code_prints_what_its_page_shows(page: Path, tmp_path: Path) -> None:
    printed = examples.run_python(page, tmp_path, examples.prepare(page, tmp_path))
    for (block, output), lines in zip(examples.python_blocks(page), printed, strict=True):
        shown = output.text.splitlines() if output else []
        found = examples.difference(shown, lines)
        assert found is None, f"{block.name}\n{found}"


def test_an_output_is_compared_but_for_times_and_rates() -> None:
    shown = ["kvsim replay", "run  5 requests in 0.1 s, 50 requests/s; trace read in 1.2e-05 s", "...", "hit rate 5.00%"]
    printed = [
        "kvsim replay  ",
        "run     5 requests in 12 s, 1,050.5 requests/s; trace read in 7 s",
        "a",
        "b",
        "hit rate 5.00%",
        "",
    ]
    assert examples.difference(shown, printed) is None
    assert examples.difference(shown, [*printed[:-2], "hit rate 5.01%"])
    assert examples.difference(shown[:2], printed)
    assert examples.difference(["job 0  hit rate 1.00%, 0.1 s"], ["job 0  hit rate 1.10%, 0.1 s"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith("https://"):
            place = (page.parent / target).resolve()
            studied = ROOT / "experiments" / place.relative_to(DOCS / "studies") if DOCS / "studies" in place.parents else place
            assert place.is_file() or studied.is_file(), f"{page.name} links to {target}, which does not exist"


def test_all_pages_are_in_the_navigation() -> None:
    class Loader(yaml.SafeLoader):
        """Reads the settings of mkdocs, whatever their tags."""

    Loader.add_multi_constructor("!", lambda loader, suffix, node: None)
    listed = set(re.findall(r"[\w/]+\.md", json.dumps(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"])))
    assert {str(page.relative_to(DOCS)) for page in SITE} <= listed
    for page in listed - {str(page.relative_to(DOCS)) for page in SITE}:
        assert (ROOT / "experiments" / page.removeprefix("studies/")).is_file(), page


def filled_pages() -> str:
    """The pages of the reference, as they are built."""
    return "\n".join(reference.fill(page.read_text()) for page in PAGES if page.parent.name == "reference")


def keys(settings: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of all settings of a YAML file."""
    found = []
    for name, value in settings.items():
        found += [f"{prefix}{name}", *(keys(value, f"{prefix}{name}.") if isinstance(value, dict) else [])]
    return found


def test_the_reference_has_every_choice_and_every_setting() -> None:
    text = filled_pages().replace("<wbr>", "")
    folders = sorted(path for path in (ROOT / "conf").iterdir() if path.is_dir() and path.name != "__pycache__")
    assert {path.name for path in folders} == set(reference.GROUPS)
    for path in sorted((ROOT / "conf").rglob("*.yaml")):
        group = "" if path.parent.name == "conf" else path.parent.name
        assert not group or f"{{ #{group}-{path.stem} }}" in text, f"{path} has no section"
        settings = {
            name: value
            for name, value in yaml.safe_load(path.read_text()).items()
            if name not in ("defaults", "hydra", "_target_")
        }
        is_over_others = group in catalog.OVER_OTHERS
        prefix = f"{group}." if group and not is_over_others else ""
        for key in keys(settings):
            shown = f"<code>{prefix}{key}" in text
            is_section = is_over_others and isinstance(_at(settings, key), dict)
            assert shown or is_section, f"{path}: {key} is not in the reference"


def _at(settings: Any, key: str) -> Any:
    for name in key.split("."):
        settings = settings[name]
    return settings


def test_the_reference_shows_defaults_and_comments() -> None:
    rows = reference.run_settings()
    comment = (ROOT / "conf" / "config.yaml").read_text().partition("\npage_tokens:")[0].splitlines()[-1]
    described = reference.paragraphs(comment.removeprefix("# "))
    assert f'<tr id="page_tokens"><td><code>page_<wbr>tokens</code></td><td><code>16</code></td><td>{described}</td></tr>' in rows
    assert "hydra.<wbr>" not in rows and "_target_" not in filled_pages()
    section = reference.policies("eviction").partition("### slru")[2].partition("### tail_latency")[0]
    purpose = "LRU in two classes, so that pages used once never push out pages used again."
    assert f"<p>{purpose}</p>" in section and "<code>eviction.<wbr>protected_<wbr>hits</code>" in section
    assert "<code>2</code>" in section


def test_every_command_is_described() -> None:
    text = (DOCS / "reference" / "commands.md").read_text()
    for name in COMMANDS:
        assert re.search(rf"^\| `kvsim {name}\b", text, re.MULTILINE), name


def test_aligned_columns_become_a_table() -> None:
    text = "Shares the tier.\n\nT1, T2   LRU each\nB1       ghosts: |B1| <= c,\n         and `x`\n\nThe end."
    assert reference.paragraphs(text) == (
        '<p>Shares the tier.</p><table class="terms"><tbody><tr><td>T1, T2</td><td>LRU each</td></tr>'
        "<tr><td>B1</td><td>ghosts: &#124;B1&#124; &lt;= c, and <code>x</code></td></tr></tbody></table><p>The end.</p>"
    )


def test_what_a_page_would_fetch_is_found() -> None:
    script = '<script async src="https://elsewhere.example/x.js">'
    assert offline.fetched(f"<p>{script}</script></p>") == script
    assert offline.fetched('<link rel="stylesheet" href=//elsewhere.example/x.css>')
    assert offline.fetched("<img alt='' src='http://elsewhere.example/x.png'>")
    own = '<script src="assets/x.js"></script><link rel="stylesheet" href="x.css"><img src="../x.png">'
    followed_by_a_reader = '<link rel="canonical" href="https://elsewhere.example/"><a href="https://elsewhere.example">x</a>'
    assert offline.fetched(own + followed_by_a_reader) is None


def table_names(page: Path, heading: str) -> list[str]:
    """The names in the first column of the table below a heading, in order."""
    section = reference.fill(page.read_text()).partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


def test_the_fields_of_a_result_are_described(tmp_path: Path) -> None:
    page = DOCS / "reference" / "results.md"
    result = kvsim.simulate(kvsim.load_trace("synthetic", sessions=3))
    result.write(tmp_path)
    written = json.loads((tmp_path / "result.json").read_text())
    described = table_names(page, "result.json")
    assert set(written) <= set(described)
    rare = {"hardware", "bounds", "config_hash", "command_line", "page_bytes", "lost_to_disagreement", "imbalance", "engines"}
    rare |= {"gpu_memory", "parallel", "rules_note", "trace_note", "model_note", "sample", "speculation", "lora", "scaling"}
    rare |= {"admission", "tool_calls"}
    assert set(described) - set(written) <= rare
    with gzip.open(tmp_path / "requests.csv.gz", "rt") as file:
        columns = next(csv.reader(file))
    told = table_names(page, "requests.csv.gz")
    assert [name for name in told if name != "decoder"] == columns


def test_the_fields_of_an_engine_are_described() -> None:
    trace = kvsim.load_trace("synthetic", sessions=3)
    engines = kvsim.simulate(trace, "cluster.prefill=1", "cluster.decode=1").record["engines"]
    described = table_names(DOCS / "reference" / "results.md", "Engines")
    assert set(engines[0]) <= set(described)
