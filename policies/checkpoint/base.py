"""The contract of checkpoint policies: after which pages a recurrent state is saved."""

from abc import ABCMeta, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.policies.context import PolicyContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """What of a prompt is about to be computed. All in pages, counted from the start of the prompt."""

    start: int
    """Computing begins after so many: a state was found there."""
    known: int
    """Of so many some tier has the KV: here the prompt leaves what is known."""
    full: int
    """Full pages of the prompt."""
    replay: int
    """Full pages that the same prompt, sent again, could reuse: its last token is always computed."""


@dataclass(kw_only=True, eq=False)
class CheckpointPolicy(metaclass=ABCMeta):
    """Says where the recurrent state of a hybrid model is saved. Models without recurrent layers take ``none`` only.

    A policy answers in pages, counted from the start of the prompt. The core rounds each down to where the model's kernels
    have a state to save (``ModelSpec.checkpoint_grid_tokens``), and leaves out what is not computed now or is saved already.
    """

    max_states_per_path: int | None = None
    """So many states along one path are kept: with one more, the one used longest ago is given up. None: no limit."""
    detached: bool = False
    """When the KV of its prefix leaves the GPU, a state stays, in a cache of its own (LRU). It counts again as soon as some tier
    has that KV."""
    detached_states: int | None = None
    """Capacity of that cache; None: no limit."""

    def __post_init__(self) -> None:
        if self.max_states_per_path is not None and self.max_states_per_path < 1:
            raise ValueError(f"max_states_per_path must be at least 1, not {self.max_states_per_path}; null sets no limit")
        if self.detached_states is not None and not self.detached:
            raise ValueError("detached_states has no effect without detached=true: set both")
        if self.detached_states is not None and self.detached_states < 1:
            raise ValueError(f"detached_states must be at least 1, not {self.detached_states}; null sets no limit")

    def bind(self, context: PolicyContext) -> None:
        """Called once, before the run."""
        self.page_tokens = context.page_tokens

    @abstractmethod
    def after_prefill(self, prefill: Prefill) -> Sequence[int]:
        """Pages of the prompt after which a state is saved."""

    def after_answer(self, prompt_pages: int, pages: int) -> Sequence[int]:
        """Pages after which a state is saved while the answer is generated, from the prompt's full ones to ``pages``."""
        return ()

    def multiples(self, tokens: int, start: int, stop: int) -> list[int]:
        """The full pages before each multiple of ``tokens``, or of a page if that is more, after ``start`` and up to ``stop``."""
        step = max(tokens, self.page_tokens)
        first, last = start * self.page_tokens // step + 1, stop * self.page_tokens // step
        return [at * step // self.page_tokens for at in range(first, last + 1)]
