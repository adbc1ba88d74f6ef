"""What versions of SGLang do differently with memory on the GPU alone: one row each."""

from collections.abc import Mapping
from typing import NamedTuple


class Version(NamedTuple):
    """The rules of a version that others do not have."""

    evicts_in_full: bool
    """Whether, without enough free memory, as much is evicted as is needed in all, not only what is missing."""
    decodes_past_end: bool
    """Whether, with the overlap loop, a request whose last token is being computed decodes once more, with memory for it."""
    leaves_late: bool
    """Whether requests that have ended count as running until a step of answers is formed, so that nobody is tried before."""
    checks_budget_first: bool
    """Whether nobody is tried if the chunk that goes on has taken all tokens of a step; otherwise one is, and refused."""
    refreshes_waiting: bool
    """Whether prompts of waiting requests that stay in their order are looked up now and then, which refreshes them."""
    looks_up_at_end: bool
    """Whether a request that ends looks its prompt up once more, which refreshes it."""


VERSIONS: Mapping[str, Version] = {
    "0.5.23": Version(
        evicts_in_full=False,
        decodes_past_end=False,
        leaves_late=False,
        checks_budget_first=True,
        refreshes_waiting=True,
        looks_up_at_end=True,
    ),
    "0.5.15": Version(
        evicts_in_full=True,
        decodes_past_end=True,
        leaves_late=True,
        checks_budget_first=False,
        refreshes_waiting=False,
        looks_up_at_end=False,
    ),
}
LATEST = "0.5.23"
