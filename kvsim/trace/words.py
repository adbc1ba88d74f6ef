"""Prompts written out in the configuration, for examples small enough to follow by hand."""

from dataclasses import dataclass

from kvsim.core.request import Request
from kvsim.numbers import Whole, check_settings
from kvsim.pages.extents import Extent, count_pages
from kvsim.trace.base import OF_MAX_TOKENS, TAILS, Trace, TraceSource, check_choice, check_page_tokens, name_pages
from kvsim.trace.page_hasher import PageHasher
from kvsim.trace.page_index import PageIndex


@dataclass(kw_only=True)
class Words(TraceSource):
    """Turns each prompt into a request and each of its words into a token; one prompt arrives per second."""

    prompts: list[str]
    output_tokens: int = 1
    """Tokens per answer."""
    tail: str = "full"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("tail", self.tail, TAILS)
        if not self.prompts or not all(isinstance(prompt, str) and prompt.split() for prompt in self.prompts):
            raise ValueError("prompts must be a list of texts with at least one word each")
        longest = max(len(prompt.split()) for prompt in self.prompts)
        if longest > self.max_tokens:
            raise ValueError(f"prompts must be of at most {self.max_tokens} words (max_tokens), not {longest}")
        check_settings(self, Whole(0, self.max_tokens), "output_tokens", hint=OF_MAX_TOKENS)

    def load(self, page_tokens: int) -> Trace:
        requests = [
            Request(
                index=index,
                arrival_s=index / self.rate,
                prompt_tokens=len(words),
                output_tokens=self.output_tokens,
                runs=extents,
                prompt_pages=count_pages(extents),
                bigram=self.bigram,
            )
            for index, (words, extents) in enumerate(self._prompts(page_tokens))
        ]
        return Trace(name="words", requests=requests, page_tokens=page_tokens, block_tokens=None)

    def page_names(self, page_tokens: int) -> dict[int, str]:
        return name_pages(self._prompts(page_tokens), page_tokens)

    def _prompts(self, page_tokens: int) -> list[tuple[list[str], tuple[Extent, ...]]]:
        """Return the words of each prompt and its extents of page ids."""
        check_page_tokens(page_tokens)
        hasher, index = PageHasher(page_tokens, bigram=self.bigram), PageIndex()
        tokens: dict[str, int] = {}
        prompts = []
        for words in map(str.split, self.prompts[: self.limit]):
            keys = hasher.keys([tokens.setdefault(word, len(tokens)) for word in words], partial_tail=self.tail == "all")
            prompts.append((words, index.lookup(keys)))
        return prompts
