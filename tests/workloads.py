"""The workloads that tests share: prompts as words, requests drawn from a seed, conversations, and trace files of them.

The same seed gives the same workload. None needs a recorded trace.
"""

import gzip
import json
import os
from collections.abc import Callable, Iterable, Sequence
from math import inf
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import strategies as st

from kvsim.core.request import Request, RetentionRange
from kvsim.pages.extents import Extent, append_extent
from kvsim.trace.synthetic import Kind, Synthetic

# --- pages, words, requests ------------------------------------------------------------------------------------------


EXAMPLES = int(os.environ.get("KVSIM_MODEL_EXAMPLES", 20))
"""How much random tests play; `make test-long` plays ten times as much."""


def extents_of(pages: Iterable[int]) -> tuple[Extent, ...]:
    """Page ids, in the order of a prompt, as normalised extents."""
    extents: list[Extent] = []
    for page in pages:
        append_extent(extents, page, 1)
    return tuple(extents)


def pages_of(extents: Iterable[Extent]) -> list[int]:
    """The page ids of extents, one by one."""
    return [start + at for start, pages in extents for at in range(pages)]


def make_request(
    pages: Sequence[int],
    *,
    index: int = 0,
    prompt_tokens: int | None = None,
    output_tokens: int = 0,
    arrival_s: float = 0.0,
    **about: Any,
) -> Request:
    """A request whose prompt has these page ids; without ``prompt_tokens``, pages are of one token."""
    return Request(
        index=index,
        arrival_s=arrival_s,
        prompt_tokens=len(pages) if prompt_tokens is None else prompt_tokens,
        output_tokens=output_tokens,
        runs=extents_of(pages),
        prompt_pages=len(pages),
        **about,
    )


class Words:
    """Page ids for prompts that are words, a page for each letter. A word may also be a tuple.

    A page is new, and gets the next id, where no word before began the same way.
    """

    def __init__(self) -> None:
        self.ids: dict[Any, int] = {}
        """By the beginning of a word, the id of its last page."""

    def pages(self, word: str | tuple[Any, ...]) -> list[int]:
        """The page ids of a word."""
        return [self.ids.setdefault(word[:end], len(self.ids)) for end in range(1, len(word) + 1)]

    def request(self, word: str, *, page_tokens: int = 1, tail: int = 0, output: int = 0, **about: Any) -> Request:
        """A prompt of the pages of a word and ``tail`` tokens more."""
        tokens = len(word) * page_tokens + tail
        return make_request(self.pages(word), prompt_tokens=tokens, output_tokens=output, **about)

    def answered(
        self,
        word: str | tuple[Any, ...],
        *,
        index: int,
        page_tokens: int,
        tail: int,
        output: int,
        answer: Callable[[int], Sequence[str]] | None = None,
        **about: Any,
    ) -> Request:
        """A prompt of the pages of a word and ``tail`` tokens more, whose answer's pages are known.

        ``answer`` returns the letters of so many pages; without it, no other request has them.
        """
        tokens = len(word) * page_tokens + tail
        count = (tokens + output - 1) // page_tokens - len(word)
        pages = self.pages((*word, *(answer(count) if answer else [f"{index}-{at}" for at in range(count)])))
        about.update(output_runs=extents_of(pages[len(word) :]), own_path=None if answer else extents_of(pages))
        return make_request(pages[: len(word)], index=index, prompt_tokens=tokens, output_tokens=output, **about)

    def text(self, extents: Iterable[Extent]) -> str:
        """The letters of pages."""
        letters = {page: word[-1] for word, page in self.ids.items()}
        return "".join(letters[page] for page in pages_of(extents))


def make_requests(words: Sequence[str], *, output_tokens: int = 0) -> list[Request]:
    """A request for each word, one a second; pages are of one token."""
    ids = Words()
    return [ids.request(word, output=output_tokens, index=at, arrival_s=float(at)) for at, word in enumerate(words)]


def paths_of(words: Sequence[str]) -> list[tuple[Extent, ...]]:
    """The extents of each word."""
    return [request.runs for request in make_requests(words)]


# --- drawn from a seed -----------------------------------------------------------------------------------------------


def random_word(random: Random, letters: str = "ab", longest: int = 6) -> str:
    """A word of 1 to ``longest`` letters; with few letters, many words begin the same way."""
    return "".join(random.choice(letters) for _ in range(random.randint(1, longest)))


def random_requests(seed: int, *, requests: int = 60, page_tokens: int = 4, max_pages: int = 12) -> list[Request]:
    """Short prompts over two letters: 40% repeat an earlier one, 30% continue one, and 30% branch off somewhere within one.

    Most prompts fill their last page, a few are shorter than a page, and half of the answers are empty. Three requests
    arrive every second.
    """
    random = Random(seed)
    ids, words, made = Words(), [""] if page_tokens > 1 else ["a"], list[Request]()
    for index in range(requests):
        word, kind = random.choice(words), random.random()
        if kind > 0.7:
            word = word[: random.randint(0, len(word))]
        if kind > 0.4:
            word = (word + random_word(random, longest=5))[:max_pages]
        words.append(word)
        tail = max(random.randrange(page_tokens) if random.random() < 0.5 else 0, not word)
        output = random.randrange(3 * page_tokens) if random.random() < 0.5 else 0
        made.append(
            ids.request(word, page_tokens=page_tokens, tail=tail, output=output, index=index, arrival_s=float(index // 3))
        )
    return made


def conversations(seed: int = 0, *, requests: int = 40, page_tokens: int = 16, gap_s: float = 100.0) -> list[Request]:
    """Sessions side by side, about ``gap_s`` seconds between two requests; no prompt is longer than 20 pages.

        chats       a few turns that build on each other, after one of three system prompts
        agents      many short turns in quick succession, after one system prompt
        documents   several questions about one document

    Some answers are longer than any prompt. With an even seed, only full pages of a prompt have ids; with an odd one, so does
    the partial page at its end.
    """

    def scaled(tokens: int) -> int:
        return max(1, round(tokens * page_tokens / 16))

    chat = {"systems": 3, "system_tokens": scaled(60), "turns": 4, "message_tokens": scaled(40), "answer_tokens": scaled(60)}
    agent = {"systems": 1, "system_tokens": scaled(80), "turns": 8, "message_tokens": scaled(10), "answer_tokens": scaled(15)}
    document = {"systems": 2, "system_tokens": scaled(30), "document_tokens": scaled(100), "turns": 3, "remembers": False,
                "message_tokens": scaled(20), "answer_tokens": scaled(30)}  # fmt: skip
    source = Synthetic(
        seed=seed, limit=requests, sessions=requests, sessions_per_s=0.3 / gap_s, arrivals="open_loop",
        max_prompt_tokens=20 * page_tokens, tail=("full", "all")[seed % 2],
        mix={
            "chat": Kind(weight=2, pause_s=10 * gap_s, **chat),
            "agent": Kind(weight=1, pause_s=gap_s, **agent),
            "document": Kind(weight=1, pause_s=5 * gap_s, **document),
        },
    )  # fmt: skip
    return as_recorded(source.load(page_tokens).requests)


def long_conversations(seed: int = 0, *, requests: int = 1_000, page_tokens: int = 512) -> list[Request]:
    """Sessions with as many tokens, turns and shared pages as recorded traces: 10,000 tokens a prompt on average.

    The partial page at the end of a prompt has an id.
    """
    source = Synthetic(seed=seed, limit=requests, sessions=requests, arrivals="open_loop", tail="all")
    return as_recorded(source.load(page_tokens).requests)


def as_recorded(requests: list[Request]) -> list[Request]:
    """Number pages in the order in which prompts show them, as a recorded trace does: prompts of sessions that take turns then
    have several extents. Pages of answers that no prompt shows come last. Sessions get priority 0, 1 or 2 in turn, and
    the first half of each prompt is to stay longer than the rest, for a while.
    """
    ids: dict[int, int] = {}
    for request in requests:
        request.runs = extents_of(ids.setdefault(page, len(ids)) for page in pages_of(request.runs))
        request.priority = request.session % 3
        half = request.prompt_tokens // 2
        request.retention = (
            RetentionRange(0, half, 40 + request.priority, 300.0), RetentionRange(half, request.prompt_tokens, 30, inf),
        )  # fmt: skip
    for request in requests:
        request.output_runs = extents_of(ids.setdefault(page, len(ids)) for page in pages_of(request.output_runs or ()))
    return requests


# --- files -----------------------------------------------------------------------------------------------------------


def as_records(requests: Iterable[Request]) -> list[dict[str, Any]]:
    """Requests as lines of a trace in Mooncake's format, with a block id for each page."""
    return [
        {
            "timestamp": round(1_000 * request.arrival_s),
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
            "hash_ids": pages_of(request.runs),
        }
        for request in requests
    ]


def write_trace(path: Path, requests: Iterable[Request]) -> Path:
    """Write requests as a trace in Mooncake's format, gzipped if the name says so. Returns the path."""
    text = "".join(f"{json.dumps(record)}\n" for record in as_records(requests)).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


# --- Hypothesis strategies -------------------------------------------------------------------------------------------


@st.composite
def branching_requests(draw: st.DrawFn) -> list[Request]:
    """Up to 40 prompts of 1 to 6 full pages, of 4 tokens each, that branch from one another."""
    words = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple), min_size=1, max_size=40))
    ids = Words()
    return [
        make_request(ids.pages(word), index=at, prompt_tokens=4 * len(word), output_tokens=draw(st.integers(0, 9)))
        for at, word in enumerate(words)
    ]


def wildchat(folder: Path) -> Path:
    """A file of two conversations as WildChat has them, of two turns and one: 8 bytes ask for 12. The later turn comes last."""
    said = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "long answer."}]
    stamped = [[said[0], said[1] | {"timestamp": f"2023-04-09T00:0{minute}:00+00:00"}] for minute in (1, 2, 3)]
    path = folder / "wildchat.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps({"conversation": turns}) + "\n" for turns in ([*stamped[0], *stamped[2]], stamped[1]))
    return path
