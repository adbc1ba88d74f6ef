"""Only the residency writes copies, pins, slots and the sums of a tier's pages."""

import ast
from pathlib import Path

import pytest

import kvsim.core.tier

KVSIM = Path(kvsim.core.tier.__file__).parents[1]
WRITERS = {"copies.py", "residency.py", "block_residency.py", "tier.py", "pool.py", "tree.py"}
"""The residency with its base and its one subclass, and what it consists of: tiers, their pools of slots, and the tree."""

SUMS = {"evictable_pages", "leaving_pages", "reserved_pages", "inserted_pages", "evicted_pages", "copies"}
LISTS = {"state", "slots", "pins", "children_in"}
OWN = {"own_pins", "own_children_in"}
"""What gives a node a list of its own, to be written to."""
OTHERS = {"lease", "known"}
"""A lease has a number of reserved pages of its own, a row of results sums of its own."""


def files() -> list[Path]:
    """Return all files of the core, the engine, and engines' own caches that could write these, but may not."""
    paths = [path for room in ("core", "engine", "engines") for path in (KVSIM / room).rglob("*.py")]
    return [path for path in paths if path.name not in WRITERS]


def is_list(value: ast.expr, aliases: set[str]) -> bool:
    """Whether this is one of a node's lists, or a local name for one."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Attribute) and value.func.attr in OWN
    return isinstance(value, ast.Attribute) and value.attr in LISTS or isinstance(value, ast.Name) and value.id in aliases


def is_written(target: ast.expr, aliases: set[str]) -> bool:
    """Whether an assignment to ``target`` writes what only the residency may write."""
    if isinstance(target, ast.Tuple):
        return any(is_written(part, aliases) for part in target.elts)
    if isinstance(target, ast.Subscript):
        return is_list(target.value, aliases)
    return isinstance(target, ast.Attribute) and target.attr in SUMS and ast.unparse(target.value) not in OTHERS | {"self"}


def is_pool(value: ast.expr, aliases: set[str]) -> bool:
    """Whether this is a tier's pool, or a local name for one. ``self.pool`` is a pool of blocks, which has a residency."""
    if isinstance(value, ast.Attribute):
        return value.attr == "pool" and ast.unparse(value.value) != "self"
    return isinstance(value, ast.Name) and value.id in aliases


def writes(source: str) -> list[str]:
    """Return the statements of a file that write what only the residency may write."""
    tree = ast.parse(source)
    named = [(node.targets[0], node.value) for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    lists = {name.id for name, value in named if isinstance(name, ast.Name) and is_list(value, set())} - {"slots"}
    pools = {name.id for name, value in named if isinstance(name, ast.Name) and is_pool(value, set())}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        else:
            targets = []
            call = node.func if isinstance(node, ast.Call) else None
            if isinstance(call, ast.Attribute) and call.attr in ("take", "give", "take_these") and is_pool(call.value, pools):
                found.append(ast.unparse(node))
        if any(is_written(target, lists) for target in targets):
            found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(KVSIM).as_posix())
def test_only_the_residency_writes_copies_pins_slots_and_sums(path):
    assert writes(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "node.pins[index] += 1",
        "node.own_pins()[index] = 1",
        "children_in = node.own_children_in()\nchildren_in[0] = 1",
        "upper.state[0], rest = READY, 1",
        "tier.evictable_pages -= pages",
        "del node.slots[0]",
        "pins = node.pins\npins[0] = 1",
        "gpu.pool.give(slots)",
        "pool = tier.pool\nslots = pool.take(3)",
    ],
)
def test_every_way_to_write_them_is_found(line):
    assert len(writes(line)) == 1


def test_what_a_lease_has_reserved_is_its_own():
    assert writes("lease.reserved_pages = 0\nself.slots = slots\nlease.slots = None") == []
