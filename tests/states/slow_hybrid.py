"""What a hybrid model hits, slow and obvious: the longest prefix that is known and ends at a state."""

from collections.abc import Sequence
from typing import Any

from kvsim.policies.checkpoint.base import CheckpointPolicy, Prefill


class SlowHybrid:
    """One tier, pages for ever, room for ``states`` states, one request at a time.

    A prompt is a string or a tuple with an item for each page, and a state is the prompt before it.
    """

    def __init__(self, policy: CheckpointPolicy, states: int, grid: int, recompute_last_token: bool) -> None:
        self.policy, self.room, self.grid, self.recompute = policy, states, grid, recompute_last_token
        self.known: set[Any] = set()
        self.states: list[Any] = []
        """Least recently used first."""

    def use(self, prompt: Any, answer: Any = None, *, replay: int | None = None) -> int:
        """Hit pages of a prompt; ``replay`` of its pages can be reused by another one like it: all but the last unless given.

        With an ``answer``, its pages are cached too.
        """
        full = len(prompt)
        replay = full - 1 if replay is None else replay
        known = sum(prompt[:end] in self.known for end in range(1, (replay if self.recompute else full) + 1))
        hits = max((len(state) for state in self.states if prompt[:known][: len(state)] == state), default=0)
        self._touch(prompt[:hits])
        prefill = Prefill(start=hits, known=known, full=full, replay=replay)
        self._save(prompt, self.policy.after_prefill(prefill), hits, full)
        if answer is not None:
            stop = full + len(answer)
            self._save(prompt + answer, self.policy.after_answer(full, stop), full if answer else hits, stop)
            prompt = prompt + answer
        self.known |= {prompt[:end] for end in range(1, len(prompt) + 1)}
        return hits

    def _save(self, pages: Any, depths: Sequence[int], start: int, stop: int) -> None:
        on_grid = {depth // self.grid * self.grid for depth in depths}
        for depth in sorted(depth for depth in on_grid if start < depth <= stop):
            if pages[:depth] in self.states:
                self._touch(pages[:depth])
            else:
                self.states.append(pages[:depth])
                del self.states[: max(0, len(self.states) - self.room)]

    def _touch(self, state: Any) -> None:
        if state in self.states:
            self.states.remove(state)
            self.states.append(state)
