"""Draws files that nobody would write, out of real ones, and holds their readers to one rule.

Whatever a file contains, what reads it returns, or raises an error that says in one line what is wrong with which file: no other
exception, no hang, and no more memory than a real file of that kind needs.
"""

import gzip
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from kvsim.errors import UsageError

AT_LEAST = 5
"""Examples that are drawn of everything, whatever they cost."""
EXAMPLES = int(os.environ.get("KVSIM_HOSTILE_FILES", 40))
CPU_S = 60
"""Most time that one example may take: none has much to do."""
MORE_BYTES = 1 << 30
"""Most memory that one example may take beyond what the process has."""

TEXTS = [
    "", "x", "-1", "0x1f", "é", "\x00", "\x1b[2J", "line\nline", "\ud800", "../../x", "${x}", "{{x}}", "long" * 2_000,
    "2023-11-16 18:15:46.68", "9999-12-31", "NaN", "1e999",
]  # fmt: skip
NUMBERS = [
    0, 1, -1, 2, 7, 16, 4097, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, -(10**30), 10**400, 0.5, -0.0, 1e-300, 1e15,
    1e300, 1e307, float("inf"), float("-inf"), float("nan"),
]  # fmt: skip
OTHERS = [
    None,
    True,
    False,
    [],
    {},
    [[]],
    [{}],
    [1, 2],
    [[1, 2]],
    [[0, 1, 2]],
    [[2, 3, "x"], [0, 9, 1]],
    ["0x1", "0x2"],
    {"a": 1},
]
DEEP: list[Any] = []
for _ in range(40):
    DEEP = [DEEP]
VALUES = (
    st.sampled_from([*TEXTS, *NUMBERS, *OTHERS, DEEP]) | st.integers(-5, 40) | st.integers() | st.floats() | st.text(max_size=5)
)
"""What stands where something else is expected."""
BITS = [
    b"", b"\n", b"\r\n", b"\r", b" ", b"\x00", b"\xff", b"\xef\xbb\xbf", b"{", b"}", b"[", b"]", b",", b'"', b"\\", b"\\ud800",
    b"NaN", b"1e400", b"9" * 5_000, b"[" * 3_000, b"[" * 100_000, b'{"a":' * 3_000, b"{}", b"a,b\n1,2\n", b"\x1f\x8b\x08\x00",
    b"\x28\xb5\x2f\xfd", b"\n" * 70, b": ", b"- ", b"&a [*a]", b"!!python/name:os.system ", b"\t",
]  # fmt: skip


def few(examples: int = EXAMPLES, *, cost: int = 1) -> settings:
    """Settings of a test that draws files; an example that costs as much as several others is drawn less often."""
    return settings(max_examples=max(AT_LEAST, examples // cost), deadline=None, suppress_health_check=list(HealthCheck))


# --- what is drawn -----------------------------------------------------------------------------------------------------------


def places(value: Any) -> list[tuple[Any, Any]]:
    """All containers within a value with their keys or positions, from outside in."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((value, key), *places(value[key]))]


def change(draw: Callable[..., Any], value: Any, fields: Sequence[str]) -> None:
    """Change one place of a value: remove, double, replace or add something. ``fields`` are names of what is added."""
    known = places(value)
    container, key = draw(st.sampled_from(known)) if known else (value, 0)
    kind = draw(st.sampled_from(["replace", "replace", "remove", "double", "add"]))
    if kind == "add" or not known:
        objects = [place for place in known if isinstance(place[0], dict)]
        if not isinstance(container, dict) and objects:
            container, key = draw(st.sampled_from(objects))
        if isinstance(container, dict):
            container[draw(st.sampled_from(fields))] = deepcopy(draw(VALUES))
        else:
            container.append(deepcopy(draw(VALUES)))
    elif kind == "replace":
        container[key] = deepcopy(draw(VALUES))
    elif kind == "remove":
        del container[key]
    elif isinstance(container, list):
        container.insert(key, deepcopy(container[key]))
    else:
        container[draw(st.sampled_from(fields))] = deepcopy(container[key])


@st.composite
def changed(draw: Callable[..., Any], value: Any, fields: Sequence[str] = ()) -> Any:
    """A value of JSON after a few changes; by default, new fields have the names of old ones."""
    value = deepcopy(value)
    names = [*fields, *(key for _, key in places(value) if isinstance(key, str))] or ["x"]
    for _ in range(draw(st.integers(1, 4))):
        change(draw, value, names)
    return value


@st.composite
def changed_bytes(draw: Callable[..., Any], content: bytes) -> bytes:
    """A file with bytes put in, taken out or overwritten at a few places."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(content)))
        more = draw(st.sampled_from(BITS) | st.binary(max_size=9))
        content = content[:at] + more + content[at + draw(st.sampled_from([0, 0, 1, len(more), 10**9])) :]
    return content


def json_files(value: Any) -> st.SearchStrategy[bytes]:
    """A file of JSON with changed fields or changed bytes."""
    return changed(value).map(as_json) | changed_bytes(as_json(value))


def json_lines(values: Sequence[Any]) -> st.SearchStrategy[bytes]:
    """A file with a value a line, with changed fields or changed bytes."""
    return changed(list(values)).map(as_lines) | changed_bytes(as_lines(values))


def gzipped(contents: st.SearchStrategy[bytes], whole: bytes) -> st.SearchStrategy[bytes]:
    """A gzip file with one of these contents, or one of ``whole`` that is damaged itself."""
    return contents.map(packed) | changed_bytes(packed(whole))


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def as_lines(values: Any) -> bytes:
    return b"".join(as_json(value) + b"\n" for value in values)


def packed(content: bytes) -> bytes:
    """The same bytes for the same content."""
    return gzip.compress(content, compresslevel=1, mtime=0)


# --- the rule ----------------------------------------------------------------------------------------------------------------


@contextmanager
def work_budget(cpu_s: float = CPU_S) -> Iterator[None]:
    """Interrupt what does not end."""

    def stop(number: int, frame: object) -> None:
        raise AssertionError(f"more than {cpu_s} s of work")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def memory_budget(more_bytes: int = MORE_BYTES) -> Iterator[None]:
    """Let what takes more memory end with a MemoryError, where the system can say how much the process has."""
    before, has_bytes = resource.getrlimit(resource.RLIMIT_AS), 0
    with suppress(OSError):
        has_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = has_bytes + more_bytes
    if has_bytes and (before[1] == resource.RLIM_INFINITY or most < before[1]):
        resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def refusal(read: Callable[[], object], name: str, *errors: type[Exception]) -> str:
    """The line with which a file is refused; empty if it is read. ``name`` must be in it: what the user knows the file by."""
    try:
        with work_budget(), memory_budget():
            read()
    except (UsageError, *errors) as error:
        said = str(error)
        assert said.isprintable(), f"not one plain line: {said!r}"
        assert name in said, f"does not name {name}: {said}"
        assert len(said) < 1_000, f"{len(said)} characters: {said[:300]}"
        return said
    return ""


def bomb(begins: bytes = b"", repeated: bytes = b"\x00" * 64) -> bytes:
    """A small gzip file of 3 GiB: a beginning, then the same bytes again and again."""
    return packed(begins) + packed(repeated * ((1 << 26) // len(repeated))) * 48


def shown_problem(code: int, error: str, name: str) -> None:
    """Hold what a command has said of a hostile file to the rule: one line with its name, unless it has ended well."""
    lines = error.splitlines()
    assert code in (0, 1, 2), error
    assert all(line.startswith("kvsim: ") and line.isprintable() and len(line) < 1_000 for line in lines), error[:2_000]
    assert code == 0 or len(lines) == 1
    assert code != 2 or name in error, f"does not name {name}: {error}"
