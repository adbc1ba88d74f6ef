"""Draws the radix tree of a small run on the terminal: each node's content, its copies by tier, and its pins."""

from collections.abc import Mapping
from typing import Any

from rich.text import Text
from rich.tree import Tree

from kvsim.core.tier import Tier
from kvsim.core.tree import Node

MOST_NODES = 200
"""Most nodes drawn."""
MOST_CHARACTERS = 72
"""Length to which a node's content is shortened."""
MOST_STRETCHES = 6
"""Most stretches of numbers shown in one list."""


def draw_tree(cache: Any, names: Mapping[int, str], step: str = "") -> Tree:
    """Draw the nodes of a cache with numbered slots, parents above children, siblings in order of page id.

    ``names`` maps page ids to their tokens; nodes without names are shown as runs of page ids. ``step`` says what has
    just happened.
    """
    root = cache.tree.root
    nodes = list(root.descendants())
    count = f"{len(nodes):,} node{'s' * (len(nodes) != 1)}"
    title = f"radix tree, {step}: " if step else "radix tree: "
    drawn = Tree(Text(title + ", ".join([count, *map(_usage, cache.tiers)]), "bold"))
    stack = [(child, drawn) for child in _children(root)]
    left = MOST_NODES
    while stack and left:
        left -= 1
        node, place = stack.pop()
        branch = place.add(_line(node, cache.tiers, names))
        stack += [(child, branch) for child in _children(node)]
    if len(nodes) > MOST_NODES:
        drawn.add(Text(f"{len(nodes) - MOST_NODES:,} more nodes not shown; set a smaller trace.limit for a smaller tree", "dim"))
    return drawn


def _children(node: Node) -> list[Node]:
    """Return the children in reverse order, because they are popped from the end."""
    return sorted(node.children.values(), key=lambda child: -child.runs[0][0])


def _usage(tier: Tier) -> str:
    return f"{tier.name} {tier.pool.capacity - tier.pool.free:,} of {tier.pool.capacity:,} pages in use"


def _line(node: Node, tiers: list[Tier], names: Mapping[int, str]) -> Text:
    pages = f"{node.pages:,} page{'s' * (node.pages != 1)}"
    line = Text(_content(node, names)).append(f"  {pages}, {node.hits} hit{'s' * (node.hits != 1)}", "dim")
    for tier in tiers:
        if node.state[tier.index]:
            line.append(f"  {tier.name} ", "bold").append(_slots(node.slots[tier.index]))
            if node.pins[tier.index]:
                line.append(f", pinned by {node.pins[tier.index]}", "yellow")
            if not any(child.state[tier.index] for child in node.children.values()):
                line.append(", leaf", "green")
    return line


def _content(node: Node, names: Mapping[int, str]) -> str:
    """Return a node's tokens or, if unknown, its page ids."""
    if node.runs[0][0] not in names:
        text = "pages " + _listed([f"{start}-{start + length - 1}" if length > 1 else str(start) for start, length in node.runs])
    else:
        text = " ".join(names[start + at] for start, length in node.runs for at in range(length))
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 4]} ..."


def _slots(slots: Any) -> str:
    """Format slot numbers, with consecutive ascending or descending ones as ranges."""
    stretches: list[list[int]] = []
    for slot in slots.tolist():
        last = stretches[-1] if stretches else []
        if last and slot - last[-1] in (1, -1) and (len(last) == 1 or slot - last[-1] == last[1] - last[0]):
            last.append(slot)
        else:
            stretches.append([slot])
    shown = [f"{stretch[0]}-{stretch[-1]}" if len(stretch) > 1 else str(stretch[0]) for stretch in stretches]
    return f"slot{'s' * (len(slots) != 1)} " + _listed(shown)


def _listed(shown: list[str]) -> str:
    return ", ".join([*shown[:MOST_STRETCHES], *(["..."] if len(shown) > MOST_STRETCHES else [])])
