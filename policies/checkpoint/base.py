"""The contract of checkpoint policies: after which pages a recurrent state is saved."""

from abc import ABCMeta, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.numbers import Whole, check_settings
from kvsim.policies.context import PolicyContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """A prompt that is about to be computed. All values are in pages from the start of the prompt."""

    start: int
    """Where computing begins: after the state that was found, or at 0."""
    known: int
    """Leading pages whose KV some tier has: where the prompt departs from known paths."""
    full: int
    """Full pages of the prompt."""
    replay: int
    """Full pages that the same prompt could reuse if sent again; its last token is always computed."""


@dataclass(kw_only=True, eq=False)
class CheckpointPolicy(metaclass=ABCMeta):
    """Decides where the recurrent state of a hybrid model is saved. Models without recurrent layers accept only ``none``.

    Answers are in pages from the start of the prompt. The core rounds each down to where the model's kernels have a state to
    save (``ModelSpec.checkpoint_grid_tokens``), and skips places that are not computed now or have a saved state already.
    """

    max_states_per_path: int | None = None
    """Maximum number of states kept along one path: beyond it, the least recently used one is dropped. None: no limit."""
    detached: bool = False
    """Whether a state stays, in its own LRU cache, when the KV of its prefix leaves the GPU. It becomes usable again as
    soon as some tier has that KV."""
    detached_states: int | None = None
    """Capacity of that cache, in states. None: no limit."""

    def __post_init__(self) -> None:
        check_settings(self, Whole(1), "max_states_per_path", "detached_states", or_null=True, hint="null sets no limit")
        if self.detached_states is not None and not self.detached:
            raise ValueError("detached_states has no effect without detached=true: set both")

    def bind(self, context: PolicyContext) -> None:
        """Called once, before the run."""
        self.page_tokens = context.page_tokens

    @abstractmethod
    def after_prefill(self, prefill: Prefill) -> Sequence[int]:
        """Return the pages of the prompt after which a state is saved."""

    def after_answer(self, prompt_pages: int, pages: int) -> Sequence[int]:
        """Return the pages after which a state of the answer is saved: above ``prompt_pages``, the prompt's full pages, and up to
        ``pages``."""
        return ()

    def retention_interval_tokens(self) -> int:
        """Return the interval at which vLLM keeps states beside those at junctions and replay boundaries; 0: none.

        Raises ValueError if the policy is not one of vLLM's.
        """
        raise ValueError(f"vLLM keeps states at junctions and intervals, not by {type(self).__name__}: set checkpoint=retention")

    def multiples(self, tokens: int, start: int, stop: int) -> list[int]:
        """Return the full pages before each multiple of ``tokens`` (at least a page) after page ``start`` and up to ``stop``."""
        step = max(tokens, self.page_tokens)
        first, last = start * self.page_tokens // step + 1, stop * self.page_tokens // step
        return [at * step // self.page_tokens for at in range(first, last + 1)]
