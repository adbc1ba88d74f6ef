"""The examples on the pages: what they are, how they are run, and whether they print what a page shows.

A ``console`` block holds commands (``$ kvsim ...``) with what they print, a ``python`` block code; the ``text`` block right after
one is its output. A line ``...`` stands for any lines. A block whose title is a path is written to that file first. A comment in
front of a block says what it needs: ``<!-- example: long -->``, ``<!-- example: skip, REASON -->``, or
``<!-- example: continues -->`` for one that runs in the folder of the block before it.

``python docs/examples.py PAGE...`` runs the examples of pages (all if none is named) and writes what they print into them.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
TRACES = ROOT.parent / "shared" / "traces"
REAL_TRACES = ("mooncake_conversation_trace.jsonl.gz", "weka_claude_code_traces_rle.jsonl.gz")
PARTS = ("kvsim", "policies", "kernels", "conf", "tests", "pyproject.toml")
"""What a page that adds files to the repository gets a copy of."""

BLOCK = re.compile(
    r"(?:^<!-- example: (?P<note>.*?) -->\n)?"
    r"^(?P<fence>```+) ?(?P<language>console|python|json|yaml|text|sh)(?: title=\"(?P<title>.*?)\")?\n"
    r"(?P<text>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
PROGRESS = re.compile(r".*: [\d,]+ of [\d,]+ \w+ after [\d.]+ (s|min|h)")
"""What a command says of itself each half minute, on a machine that is slow enough."""
VOLATILE = re.compile(r"[\d.,]+(?:e-\d+)? (m?s|requests/s)\b")
DRIVER = """
import contextlib, io, json, sys
names = {"__name__": "__main__"}
printed = []
for code in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, "<example>", "exec"), names)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    title: str | None
    note: str
    text: str
    start: int
    """Where its text begins and ends in the page."""
    end: int

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT).with_suffix('')}:{self.line}"

    @property
    def is_long(self) -> bool:
        return self.note == "long"

    @property
    def skip_reason(self) -> str | None:
        """Why it is not run: the page says so, or a real trace is missing."""
        if self.note.startswith("skip, "):
            return self.note.removeprefix("skip, ")
        if any(name in self.text and not (TRACES / name).exists() for name in REAL_TRACES):
            return "real traces are not part of the repository: put them into ../shared/traces"
        return None


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command of a console block and what the page shows of its output."""

    command: str
    shown: list[str]


def pages() -> list[Path]:
    """README.md and the pages of the site that are stored in the repository."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    text = page.read_text()
    found = []
    for match in BLOCK.finditer(text):
        found.append(
            Block(
                page=page,
                line=text.count("\n", 0, match.start("fence")) + 1,
                language=match["language"],
                title=match["title"],
                note=match["note"] or "",
                text=match["text"],
                start=match.start("text"),
                end=match.end("text"),
            )
        )
    return found


def console_blocks(page: Path) -> list[Block]:
    """The blocks of commands."""
    return [block for block in blocks(page) if block.language == "console"]


def chains(page: Path) -> list[list[Block]]:
    """The blocks of commands, each with those that continue it."""
    found: list[list[Block]] = []
    for block in console_blocks(page):
        if block.note == "continues":
            found[-1].append(block)
        else:
            found.append([block])
    return found


def python_blocks(page: Path) -> list[tuple[Block, Block | None]]:
    """The blocks of code that are run, each with the one that shows its output."""
    found = blocks(page)
    pairs: list[tuple[Block, Block | None]] = []
    for i, block in enumerate(found):
        if block.language == "python" and block.title is None and block.skip_reason is None:
            following = found[i + 1] if i + 1 < len(found) else None
            gap = page.read_text()[block.end : following.start].count("\n") if following else 0
            pairs.append((block, following if following and following.language == "text" and gap <= 5 else None))
    return pairs


def steps(block: Block) -> list[Step]:
    """The commands of a console block, in order."""
    found: list[Step] = []
    lines = iter(block.text.splitlines())
    for line in lines:
        if line.startswith("$ "):
            command = line[2:]
            while command.endswith("\\"):
                command = f"{command}\n{next(lines)}"
            found.append(Step(command=command, shown=[]))
        elif found:
            found[-1].shown.append(line)
        else:
            raise ValueError(f"{block.name}: the block begins with output; commands begin with '$ '")
    return found


def prepare(page: Path, folder: Path) -> Path:
    """Fill a folder with all that the page's examples need. Returns the folder from which kvsim is to be imported."""
    files = [block for block in blocks(page) if block.title is not None]
    adds_to_repository = any((block.title or "").startswith(("policies/", "conf/")) for block in files)
    root = ROOT
    if adds_to_repository or "kvsim calibrate" in page.read_text():
        root = folder
        for part in PARTS:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, folder / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / part)
    for block in files:
        path = folder / (block.title or "")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)
    for name in REAL_TRACES:
        if (TRACES / name).exists():
            (folder / name).symlink_to(TRACES / name)
    return root


def run_command(command: str, folder: Path, root: Path) -> list[str]:
    """What a command prints, as on a terminal of 100 columns. Raises AssertionError if it ends in a traceback."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "100",
        "NO_COLOR": "1",
    }
    ran = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert "Traceback (most recent call last)" not in ran.stdout, ran.stdout
    return [line.rstrip() for line in ran.stdout.rstrip("\n").splitlines() if not PROGRESS.fullmatch(line)]


def run_python(page: Path, folder: Path, root: Path) -> list[list[str]]:
    """What each block of code prints; all run one after another in one process. Raises AssertionError if one fails."""
    codes = [block.text for block, _ in python_blocks(page)]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", DRIVER],
        input=json.dumps(codes),
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
    )
    assert ran.returncode == 0, ran.stderr
    return [printed.rstrip("\n").splitlines() for printed in json.loads(ran.stdout)]


def difference(shown: Sequence[str], printed: Sequence[str]) -> str | None:
    """How the output differs from what a page shows, apart from seconds and requests a second; None if it does not."""
    expected = [_normal(line) for line in _trimmed(shown)]
    actual = [_normal(line) for line in _trimmed(printed)]
    if _matches(expected, actual):
        return None
    return "\n".join(["the page shows", *shown, "", "but it prints", *printed])


def _matches(expected: list[str], actual: list[str]) -> bool:
    """Whether the lines are the expected ones, where ``...`` stands for any number of lines."""
    matched = {0}
    for line in expected:
        if line == "...":
            matched = set(range(min(matched, default=len(actual) + 1), len(actual) + 1))
        else:
            matched = {count + 1 for count in matched if count < len(actual) and actual[count] == line}
    return len(actual) in matched


def _trimmed(lines: Sequence[str]) -> list[str]:
    """The lines without trailing blanks, and without blank lines at the end."""
    return "\n".join(line.rstrip() for line in lines).rstrip("\n").splitlines()


def _normal(line: str) -> str:
    """A line in which times of this run and rates stand for any; columns may move with them."""
    if line.startswith(("run ", "job ")) or "trace read in" in line or "requests/s" in line:
        line = VOLATILE.sub(r"# \1", line)
        line = re.sub(r" {2,}", "  ", line)
    return line


# Bringing pages up to date


def update(page: Path) -> None:
    """Write what the examples of a page print into it, where it differs by more than times and rates.

    Outputs with ``...`` in them stay as they are; a difference is reported.
    """
    replaced: list[tuple[int, int, str]] = []
    for chain in chains(page):
        if reason := chain[0].skip_reason:
            print(f"{chain[0].name}: skipped: {reason}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            root = prepare(page, Path(folder))
            for block in chain:
                lines = [line for step in steps(block) for line in _updated(block, step, Path(folder), root)]
                replaced.append((block.start, block.end, "".join(f"{line}\n" for line in lines)))
    pairs = python_blocks(page)
    if any(output for _, output in pairs):
        with tempfile.TemporaryDirectory() as folder:
            printed = run_python(page, Path(folder), prepare(page, Path(folder)))
        for (_, output), lines in zip(pairs, printed, strict=True):
            if output is not None and "...\n" not in output.text:
                replaced.append((output.start, output.end, "".join(f"{line}\n" for line in lines)))
    text = page.read_text()
    for start, end, new in sorted(replaced, reverse=True):
        text = text[:start] + new + text[end:]
    page.write_text(text)


def _updated(block: Block, step: Step, folder: Path, root: Path) -> Iterator[str]:
    printed = run_command(step.command, folder, root)
    yield f"$ {step.command}"
    found = difference(step.shown, printed)
    if found and "..." in step.shown:
        print(f"{block.name}: {found}")
    yield from step.shown if found is None or "..." in step.shown else printed


if __name__ == "__main__":
    for chosen in [Path(word).resolve() for word in sys.argv[1:]] or pages():
        update(chosen)
