"""What arXiv:2609.28870 and its public artifacts print, and ranks to compare orders by.

The paper's own text was not at hand. Its figures are those that two public readings of it quote, which agree (pages 4 and 9 to
11); the traces are described by their data card, the cost of blocks by the authors' simulator.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

RANKS = {
    "belady_compute": 1, "random_compute": 2, "belady": 3, "lru": 4, "arc": 4, "workload_aware": 4, "lfu": 7, "w_tinylfu": 7,
}  # fmt: skip
"""The paper's order by compute saved with 24 GiB on FreeInference, as far as its text has it: ARC and workload-aware eviction are
like LRU or a little worse and share its rank; policies by frequency are far behind. SIEVE and S3-FIFO have no rank: whether they
are better than LRU depends on the trace."""
SAVED = {"random_compute": 0.638, "lru": 0.638 - 0.104}
"""Compute saved with 24 GiB on FreeInference; LRU is 10.4 points behind."""
GAP, OTHER_GAPS = 12.6, 1.1
"""Points that Belady's rule by compute saves more than Belady's rule with 24 GiB: on FreeInference, and at most elsewhere."""
CONVERGED = 0.4
"""Points that LRU saves less than the best policy without foresight with 1 TiB, at most, on three traces."""
LAYER_TFLOPS = {0: 0.13, 65_536: 1.22}
"""TFLOP of one layer of Qwen3-Coder-30B-A3B for 1,024 tokens, by the tokens before them (Liu's course report, section 3)."""
BLOCK_COST = (865.0, 2.0)
"""Measured cost of a block of 16 tokens: of the first one, and what each block before it adds, in the unit of prefixsim."""


class Published(NamedTuple):
    """A trace that the authors have released, as its data card describes it. No checksum is published."""

    file: str
    size_mb: int
    requests: int
    accesses: int
    blocks: int


TRACES = (
    Published("freeinference.lcp.zst", 76, 327_548, 656_240_179, 39_578_367),
    Published("chutes.lcp.zst", 232, 515_817, 603_642_254, 139_518_804),
)
"""Of the data set harvardMadsys/2026_prefixcache on Hugging Face, in blocks of 16 tokens."""


def published(requests: int) -> Published | None:
    """Return the published trace that has this many requests."""
    return next((trace for trace in TRACES if trace.requests == requests), None)


def kendall(ours: Mapping[str, float], ranks: Mapping[str, int]) -> float:
    """Return Kendall's tau-b between our values (the highest first) and the paper's ranks, over policies that both have.

    Pairs that share a rank count as tied; 1 if all other pairs are in the paper's order, -1 if in the opposite one.
    """
    names = [name for name in ours if name in ranks]
    pairs = [(a, b) for at, a in enumerate(names) for b in names[at + 1 :]]
    agreed = sum(sign(ours[a] - ours[b]) * sign(ranks[b] - ranks[a]) for a, b in pairs)
    of_ours = sum(ours[a] != ours[b] for a, b in pairs)
    of_theirs = sum(ranks[a] != ranks[b] for a, b in pairs)
    return float(agreed) / (of_ours * of_theirs) ** 0.5 if of_ours and of_theirs else 0.0


def sign(value: float) -> int:
    return (value > 0) - (value < 0)


def order(ours: Mapping[str, float]) -> Sequence[str]:
    """Return the policies, the one that saves most first."""
    return sorted(ours, key=lambda name: -ours[name])
