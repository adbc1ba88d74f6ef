"""Writes the reference pages: settings from ``conf``, algorithms from docstrings, fields of results from their
tables, results from ``experiments``.

A page asks for such a part with a comment, ``<!-- generated: NAME ARGUMENT -->``; ``generate`` returns what replaces it.
"""

import ast
import html
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import engine_defaults
import eviction_table
import hydra.utils
from omegaconf import OmegaConf

from kvsim.engine.columns import COLUMNS
from kvsim.engine.outcome import ALWAYS
from kvsim.results.engine_records import ENGINE
from kvsim.results.fields import FIELDS
from kvsim.results.schema import OPTIONAL, Field
from kvsim.settings import catalog
from kvsim.settings.catalog import Setting, read_settings

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"

PAGES = {
    "trace": "traces.md",
    "model": "models.md",
    "hardware": "hardware.md",
    "drive": "hardware.md#drives",
    "network": "hardware.md#network-cards",
    "engine": "settings.md#engine",
    "rules": "settings.md#rules",
    "eviction": "eviction.md",
    "placement": "placement.md",
    "prefetch": "prefetch.md",
    "checkpoint": "checkpoint.md",
    "routing": "routing.md",
    "scheduling": "scheduling.md",
    "autoscaling": "autoscaling.md",
    "admission": "admission.md",
    "logger": "settings.md#logger",
    "preset": "presets.md",
}
"""The page that describes the choices of each group."""
GROUPS = {group: (purpose, PAGES[group]) for group, purpose in catalog.GROUPS.items()}
"""Every group of ``conf``: what it chooses, and its page."""

MARKER = re.compile(r"^<!-- generated: (\S+) ?(.*?) -->$", re.MULTILINE)
ROW = re.compile(r"(\s*)(\S+(?: \S+)*)(\s{2,})(\S.*)")
OVERRIDE = re.compile(r"(?<![\w>/.-])([a-z][\w.@/]*=[^\s,;:()]*[^\s,;:().])")


def generate(name: str, argument: str) -> str:
    """The Markdown of a part. Raises KeyError for an unknown name."""
    part = PARTS[name]
    return part(argument) if argument else part()


def fill(markdown: str) -> str:
    """A page with every marker replaced by its part."""
    return MARKER.sub(lambda found: generate(found[1], found[2]), markdown)


# Settings


def read_choice(group: str, name: str) -> tuple[str, str, list[Setting]]:
    """What a choice of a group says of itself, its class, and its settings."""
    text = (CONF / group / f"{name}.yaml").read_text()
    settings = read_settings(text.removeprefix("# @package _global_\n"))
    first, *others = settings
    return first.comment, first.value or "", others


def choices(group: str) -> list[str]:
    """The names of a group's choices."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def run_settings() -> str:
    """The settings of ``conf/config.yaml`` that belong to no group."""
    settings = [setting for setting in read_settings((CONF / "config.yaml").read_text()) if setting.key != "defaults"]
    return _settings_table([setting for setting in settings if not setting.key.startswith("hydra")], has_anchors=True)


def settings_under(prefix: str) -> str:
    """The settings of ``conf/config.yaml`` below a key."""
    settings = read_settings((CONF / "config.yaml").read_text())
    return _settings_table([setting for setting in settings if setting.key.startswith(f"{prefix}.")])


def calibrate_settings() -> str:
    """The settings of ``kvsim calibrate``."""
    settings = [setting for setting in read_settings((CONF / "calibrate.yaml").read_text()) if setting.key != "defaults"]
    return _settings_table([setting for setting in settings if not setting.key.startswith("hydra")])


def groups_table() -> str:
    """Every group with its default and its choices."""
    defaults = {}
    for entry in OmegaConf.load(CONF / "config.yaml").defaults:
        if not isinstance(entry, str):
            defaults.update({str(group): choice for group, choice in entry.items()})
    lines = ["| group | chooses | default | choices |", "|---|---|---|---|"]
    for group in sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "__pycache__"):
        purpose, page = GROUPS[group]
        default = defaults[group]
        names = " ".join(f"`{name}`" for name in choices(group))
        lines.append(f"| [`{group}=`]({page}) | {purpose} | {f'`{default}`' if default else 'none'} | {names} |")
    return "\n".join(lines)


def choice_sections(group: str) -> str:
    """A section for each choice of a group, with its settings."""
    return "\n\n".join(_choice_section(group, name) for name in choices(group))


def folded_sections(group: str) -> str:
    """The same, with the settings folded away: for choices that have dozens."""
    return "\n\n".join(_choice_section(group, name, is_folded=True) for name in choices(group))


def _choice_section(group: str, name: str, *, is_folded: bool = False) -> str:
    description, _, settings = read_choice(group, name)
    table = _settings_table(settings, prefix="" if group in catalog.OVER_OTHERS else f"{group}.")
    if is_folded and table:
        table = f"<details><summary>Settings of <code>{group}={name}</code></summary>\n{table}\n</details>"
    return f"### {name} {{ #{group}-{name} }}\n\n{paragraphs(description)}\n\n{table}"


def _settings_table(settings: list[Setting], prefix: str = "", *, has_anchors: bool = False) -> str:
    if not settings:
        return ""
    rows = []
    for setting in settings:
        if setting.value is None and not setting.comment:
            continue
        key = html.escape(prefix + setting.key)
        if setting.value is None:
            value = ""
        elif setting.value == "???":
            value = "required"
        else:
            value = f"<code>{html.escape(setting.value)}</code>"
        row = f'<tr id="{key}">' if has_anchors else "<tr>"
        rows.append(f"{row}<td><code>{_breakable(key)}</code></td><td>{value}</td><td>{paragraphs(setting.comment)}</td></tr>")
    head = "<thead><tr><th>setting</th><th>default</th><th>meaning</th></tr></thead>"
    return "\n".join(['<div class="settings"><table>', head, "<tbody>", *rows, "</tbody></table></div>"])


def _breakable(key: str) -> str:
    """A key that may be broken after its dots and underscores."""
    return re.sub(r"([._])", r"\1<wbr>", key)


# Policies


def policies(family: str) -> str:
    """A section for each policy of a family: purpose, algorithm, settings."""
    return "\n\n".join(_policy_section(family, name) for name in choices(family))


def policies_table(family: str) -> str:
    """Every policy of a family with its purpose."""
    rows = ["| policy | purpose |", "|---|---|"]
    for name in choices(family):
        purpose = _docstring(read_choice(family, name)[1]).splitlines()[0]
        rows.append(f"| [`{name}`](#{family}-{name}) | {_inline(purpose)} |")
    return "\n".join(rows)


def _policy_section(family: str, name: str) -> str:
    description, target, settings = read_choice(family, name)
    body = _docstring(target)
    table = _settings_table(settings, prefix=f"{family}.")
    source = f'<p class="source">{_inline(_source(target))}</p>'
    advice = f'<p class="advice"><code>{family}={name}</code> {_inline(" ".join(description.split()))}</p>'
    return f"### {name} {{ #{family}-{name} }}\n\n{paragraphs(body)}\n{advice}\n{source}\n\n{table}"


def _docstring(target: str) -> str:
    """What a class says of itself."""
    module, _, name = target.rpartition(".")
    found = [one for one in _parsed(module).body if isinstance(one, ast.ClassDef) and one.name == name]
    return ast.get_docstring(found[0]) or ""


@cache
def _parsed(module: str) -> ast.Module:
    """The source of a module: once compiled, modules and their classes have no docstrings."""
    return ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())


def _source(target: str) -> str:
    """What the module of a class says of where the algorithm comes from, and its file."""
    module, _, _ = target.rpartition(".")
    return f"{_origin(target)} ``{module.removeprefix('kvsim.').replace('.', '/')}.py``"


def _origin(target: str) -> str:
    """Where the algorithm of a class comes from, in the words of its module."""
    module, _, _ = target.rpartition(".")
    return " ".join((ast.get_docstring(_parsed(module)) or "").partition("\n\n")[0].split())


def eviction_choice() -> str:
    """Every eviction policy: when to use it, when not, its paper, and what came out in the studies."""
    papers = {name: _inline(_origin(read_choice("eviction", name)[1])) for name in choices("eviction")}
    return eviction_table.table(list(papers), papers.__getitem__)


# Traces, presets, models, machines


def traces() -> str:
    """A section for each format of traces: what is read, and its settings."""
    sections = []
    for name in choices("trace"):
        description, target, settings = read_choice("trace", name)
        body = paragraphs(f"{description}\n\n{_docstring(target)}")
        sections.append(f"### {name} {{ #trace-{name} }}\n\n{body}\n\n{_settings_table(settings, prefix='trace.')}")
    return "\n\n".join(sections)


def presets() -> str:
    """A section for each preset: what it stands for, and everything that it sets."""
    sections = []
    for name in choices("preset"):
        text = (CONF / "preset" / f"{name}.yaml").read_text().removeprefix("# @package _global_\n")
        head, *settings = read_settings(text)
        chosen = [entry.removeprefix("override /").split(": ") for entry in (head.value or "").split(", ")]
        overrides = " ".join(f"<code>{html.escape(group)}={html.escape(choice)}</code>" for group, choice in chosen)
        sets = [setting for setting in settings if setting.value is not None]
        parents = {setting.key: setting.comment for setting in settings if setting.value is None}
        rows = []
        for setting in sets:
            comment = setting.comment or parents.get(setting.key.rpartition(".")[0], "")
            sets_to = f"{_breakable(html.escape(setting.key))}={html.escape(setting.value or '')}"
            rows.append(f"<tr><td><code>{sets_to}</code></td><td>{paragraphs(comment)}</td></tr>")
        head_row = "<table><thead><tr><th>sets</th><th>why</th></tr></thead><tbody>"
        table = "\n".join([head_row, *rows, "</tbody></table>"]) if rows else ""
        intro = f"{paragraphs(head.comment)}\n<p>Chooses {overrides}.</p>"
        sections.append(f"### {name} {{ #preset-{name} }}\n\n{intro}\n\n{table}")
    return "\n\n".join(sections)


def models_table() -> str:
    """Every model with the sizes that follow from its settings."""
    lines = [
        "| model | parameters | active per token | weights | KV per token | layers with a window | state per checkpoint |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in choices("model"):
        if name == "hf":  # reads any model from a file
            continue
        model = hydra.utils.instantiate(OmegaConf.load(CONF / "model" / f"{name}.yaml"))
        weights = model.parameters * model.weight_dtype_bytes
        state = f"{model.state_bytes / 2**20:,.1f} MiB" if model.state_bytes else "none"
        cells = (
            _count(model.parameters),
            _count(model.active_parameters),
            f"{weights / 2**30:,.1f} GiB",
            f"{model.kv_bytes_per_token / 2**10:,.1f} KiB",
            f"{model.sliding_window_layers} of {model.attention_layers}" if model.sliding_window_layers else "none",
            state,
        )
        lines.append(f"| [`{name}`](#model-{name}) | {' | '.join(cells)} |")
    return "\n".join(lines)


def _count(number: float) -> str:
    return f"{number / 1e9:,.1f} billion" if number >= 1e8 else f"{number / 1e6:,.1f} million"


def hardware_table() -> str:
    """Every machine with its main rates."""
    lines = [
        "| hardware | matrix products | GPU memory | its bandwidth | host to GPU | GPU to host | all-reduce | source |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for name in choices("hardware"):
        machine: Any = OmegaConf.load(CONF / "hardware" / f"{name}.yaml")
        cells = (
            f"{float(machine.flops_per_s) * machine.flops_efficiency / 1e12:,.0f} TFLOP/s",
            f"{machine.memory_bytes / 1e9:,.0f} GB",
            f"{float(machine.memory_bytes_per_s) * machine.memory_efficiency / 1e12:,.2f} TB/s",
            *(
                f"{float(machine[rate]) / 1e9:,.1f} GB/s" if machine.get(rate) else "none"
                for rate in ("host_to_device_bytes_per_s", "device_to_host_bytes_per_s", "allreduce_bytes_per_s")
            ),
            catalog.source_of(read_choice("hardware", name)[0]) or "a formula",
        )
        lines.append(f"| [`{name}`](#hardware-{name}) | {' | '.join(cells)} |")
    return "\n".join(lines)


def drives_table() -> str:
    """Every drive with its rates."""
    lines = ["| drive | read | write | latency | source |", "|---|---:|---:|---:|---|"]
    for name in choices("drive"):
        drive: Any = OmegaConf.load(CONF / "drive" / f"{name}.yaml").hardware
        rates = [f"{float(drive[f'disk_{way}_bytes_per_s']) / 1e9:,.1f} GB/s" for way in ("read", "write")]
        cells = (*rates, f"{float(drive.disk_latency_s) * 1e6:,.0f} µs", catalog.source_of(read_choice("drive", name)[0]))
        lines.append(f"| [`{name}`](#drive-{name}) | {' | '.join(cells)} |")
    return "\n".join(lines)


def networks_table() -> str:
    """Every network card with its rates."""
    lines = ["| network card | between engines, a GPU | remote store | source |", "|---|---:|---:|---|"]
    for name in choices("network"):
        card: Any = OmegaConf.load(CONF / "network" / f"{name}.yaml")
        rates = [float(card.hardware.interconnect_bytes_per_s), float(card.tiers.remote.bytes_per_s)]
        cells = (*(f"{rate / 1e9:,.1f} GB/s" for rate in rates), catalog.source_of(read_choice("network", name)[0]))
        lines.append(f"| [`{name}`](#network-{name}) | {' | '.join(cells)} |")
    return "\n".join(lines)


# Other documents of the repository


def document(path: str) -> str:
    """A document of the repository, with a line about where it comes from in the place of its title."""
    return _without_title((ROOT / path).read_text())


def section(argument: str) -> str:
    """``PATH HEADING``: the section of a document, without its heading. Raises ValueError if it has none of that name."""
    path, _, heading = argument.partition(" ")
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", (ROOT / path).read_text(), re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"{path} has no section {heading!r}")
    return found[1].strip()


def _without_title(text: str) -> str:
    first, _, rest = text.partition("\n")
    return rest if first.startswith("# ") else text


def dependency_versions() -> str:
    """The packages of pyproject.toml and of its extras."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = ["| installed by | packages |", "|---|---|", f"| `pip install kvsim` | {_packages(project['dependencies'])} |"]
    for extra, packages in sorted(project["optional-dependencies"].items()):
        lines.append(f"| `pip install kvsim[{extra}]` | {_packages(packages)} |")
    return "\n".join(lines)


def _packages(packages: list[str]) -> str:
    return " ".join(f"`{package}`" for package in packages)


# Text


def with_tables(text: str) -> str:
    """A docstring as Markdown, in which lines that are aligned in columns are a table."""
    blocks = re.split(r"\n\s*\n", text)
    return "\n\n".join("\n\n".join(_block(block.splitlines())) if ROW.search(block) else block for block in blocks)


def paragraphs(text: str) -> str:
    """Docstring or comment as HTML: prose, and tables where lines are aligned in columns."""
    parts: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        parts.extend(_block(block.splitlines()))
    return "".join(parts)


def _block(lines: list[str]) -> Iterator[str]:
    prose: list[str] = []
    rows: list[list[str]] = []
    start = column = 0
    """Where the names of the last row begin, and their meanings."""
    for line in lines:
        row = ROW.fullmatch(line)
        indent = len(line) - len(line.lstrip())
        if row is not None and not (rows and indent >= column):
            if prose:
                yield _prose(prose)
                prose = []
            rows.append([row[2], *re.split(r"\s{2,}", row[4])])
            start, column = indent, row.end(3)
        elif rows and indent < min(column, 4 + start) and line[column - 1 : column] == " " != line[column : column + 1]:
            rows.append([line[:column].strip(), line[column:].strip()])
        elif rows and indent >= min(column, 4 + start):
            rows[-1][-1] += " " + line.strip()
        else:
            if rows:
                yield _table(rows)
                rows = []
            prose.append(line.strip())
    if rows:
        yield _table(rows)
    if prose:
        yield _prose(prose)


def _prose(lines: list[str]) -> str:
    text = " ".join(lines).strip()
    return f"<p>{_inline(text)}</p>" if text else ""


def _table(rows: list[list[str]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{_inline(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<table class="terms"><tbody>{body}</tbody></table>'


def _inline(text: str) -> str:
    """Text with code between backticks, and overrides as code."""
    parts = re.split(r"``(.+?)``|`(.+?)`", text)
    shown = []
    for prose, double, single in zip(parts[::3], [*parts[1::3], None], [*parts[2::3], None], strict=True):
        shown.append(OVERRIDE.sub(r"<code>\1</code>", html.escape(prose, quote=False)).replace("|", "&#124;"))
        if code := double or single:
            shown.append(f"<code>{html.escape(code, quote=False)}</code>".replace("|", "&#124;"))
    return "".join(shown)


# Results


def result_fields() -> str:
    """The fields of ``result.json``."""
    return _fields_table(FIELDS)


def engine_fields() -> str:
    """The fields of each of ``engines`` in ``result.json``."""
    return _fields_table(ENGINE)


def _fields_table(rows: list[Field]) -> str:
    notes = {OPTIONAL: "optional: "}
    lines = [f"| `{row.name}` | {notes.get(row.presence, '')}{row.meaning} |" for row in rows]
    return "\n".join(["| field | meaning |", "|---|---|", *lines])


def request_columns() -> str:
    """The columns of ``requests.csv.gz``."""
    lines = []
    for column in COLUMNS:
        names = ", ".join(f"`{name}`" for name in column.headings(ALWAYS))
        lines.append(f"| {names} | {column.kind_name} | {column.meaning} |")
    return "\n".join(["| column | type | meaning |", "|---|---|---|", *lines])


PARTS: dict[str, Callable[..., str]] = {
    "result_fields": result_fields,
    "engine_fields": engine_fields,
    "request_columns": request_columns,
    "run_settings": run_settings,
    "settings_under": settings_under,
    "calibrate_settings": calibrate_settings,
    "groups_table": groups_table,
    "choice_sections": choice_sections,
    "folded_sections": folded_sections,
    "policies": policies,
    "policies_table": policies_table,
    "eviction_choice": eviction_choice,
    "traces": traces,
    "presets": presets,
    "engine_defaults": engine_defaults.sections,
    "models_table": models_table,
    "hardware_table": hardware_table,
    "drives_table": drives_table,
    "networks_table": networks_table,
    "document": document,
    "section": section,
    "dependency_versions": dependency_versions,
}
"""What a page can ask for."""
