"""Checkpoints where prompts diverge: the admission of Marconi (Pan et al., MLSys 2025, section 4.1)."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.policies.checkpoint.base import CheckpointPolicy, Prefill


@dataclass(kw_only=True, eq=False)
class Branch(CheckpointPolicy):
    """Saves at most two states per request: at the end of a prefix that a second prompt shows to be shared, and after the answer.

    prompt   after the last page that it has in common with known prompts, unless a state was found there
    answer   after the last full page

    With ``prompt_end``, also after the last full page of every prompt, as SGLang does.
    """

    prompt_end: bool = False

    def after_prefill(self, prefill: Prefill) -> Sequence[int]:
        junction = (prefill.known,) if prefill.start < prefill.known else ()
        return (*junction, prefill.full) if self.prompt_end else junction

    def after_answer(self, prompt_pages: int, pages: int) -> Sequence[int]:
        return (pages,)
