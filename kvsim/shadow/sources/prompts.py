"""Lines with prompts as tokens or text, as ``trace=tokens`` and ``trace=openai`` read them, to live requests."""

import secrets
from collections.abc import Iterator
from typing import NamedTuple

from kvsim.shadow.live import LiveRequest
from kvsim.shadow.sources.byte_text import BYTES_PER_TOKEN, ByteText
from kvsim.shadow.sources.salt import Salt
from kvsim.trace.lines import TEXT_LINES, TOKEN_LINES
from kvsim.trace.page_hasher import PageHasher
from kvsim.trace.records import Record
from kvsim.trace.text import TextTrace, Turn, tokenized
from kvsim.trace.tokenizer import TemplateError, Tokenizer


class Told(NamedTuple):
    """What a source knows of a request besides its prompt and the text of its answer."""

    arrival_s: float
    session: str | None = None
    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    """As the server counts them."""
    output_tokens: int | None = None


class Prompts:
    """Turns lines into requests with salted keys of their pages; the text is forgotten at once.

    Where an answer's length is known and its tokens are not, it has pages of its own.
    """

    def __init__(self, page_tokens: int, salt: Salt, tokenizer: str | None) -> None:
        """Raises UsageError for a folder without a tokenizer."""
        self.tokenizer: Tokenizer = ByteText() if tokenizer is None else Tokenizer(tokenizer, "shadow.tokenizer")
        self.read_bytes = False
        """Whether a text has been cut into pages by its bytes."""
        self._has_bytes = tokenizer is None
        self.other_lengths = 0
        """Prompts whose number of tokens is not what the server says."""
        self._salt = salt
        self._hashers = {unit: PageHasher(page_tokens * unit) for unit in (1, BYTES_PER_TOKEN)}
        self._page_tokens = page_tokens

    def of_tokens(self, record: Record, told: Told) -> Iterator[LiveRequest]:
        """Yield the request of a line of tokens. Raises TraceError."""
        yield self._live(record, told, 1)

    def of_text(self, record: Record, told: Told, reader: TextTrace | None = None) -> Iterator[LiveRequest]:
        """Yield the requests of a line of text, by default the one that ``trace=openai`` sees in it. Raises TraceError."""
        try:
            turns = [self._known(turn, told) for turn in (reader or TEXT_LINES).turns(record, self.tokenizer)]
        except TemplateError as error:
            raise record.error(str(error)) from None
        for turn, line in zip(turns, tokenized(turns, self.tokenizer), strict=True):
            unit = BYTES_PER_TOKEN if self._has_bytes and isinstance(turn.prompt, str) else 1
            self.read_bytes |= unit > 1
            yield self._live(line, told, unit)

    def _known(self, turn: Turn, told: Told) -> Turn:
        """Return a request without the text of an answer that cannot be put behind a prompt of token ids."""
        if self._has_bytes and isinstance(turn.prompt, list) and turn.answer is not None:
            length = len(turn.answer) // BYTES_PER_TOKEN if told.output_tokens is None else told.output_tokens
            return turn._replace(answer=None, output_tokens=length)
        return turn

    def _live(self, record: Record, told: Told, unit: int) -> LiveRequest:
        """Return the request of a line of tokens, of which ``unit`` stand for one of the model's."""
        tokens, answer = record.integers("token_ids"), _answer(record)
        if not tokens:
            raise record.error("token_ids is empty; a request must have a prompt")
        prompt_tokens = max(1, len(tokens) // unit)
        output_tokens = self._output_tokens(record, told, unit, answer)
        hasher, size = self._hashers[unit], self._page_tokens
        keys = self._salted(TOKEN_LINES.keys_of(record, tokens + answer[:-1], hasher, tail="full"))  # the last one has no KV
        prompt_pages, pages = prompt_tokens // size, (prompt_tokens + max(output_tokens, 1) - 1) // size
        if not answer:
            keys = keys[:prompt_pages] + self._unknown(pages - prompt_pages)
        request = LiveRequest(
            arrival_s=told.arrival_s,
            keys=tuple(keys[:prompt_pages]),
            prompt_tokens=prompt_tokens,
            output_keys=tuple(keys[prompt_pages:pages]),
            output_tokens=output_tokens,
            session=told.session,
            cached_tokens=told.cached_tokens,
        )
        return self._as_counted(request, told, unit)

    def _unknown(self, pages: int) -> list[bytes]:
        """Return keys that no other page has, for an answer of unknown tokens: engines keep it, and nobody finds it."""
        name = secrets.token_bytes(16) if pages else b""
        return [self._salt.key(name + page.to_bytes(4, "big")) for page in range(pages)]

    def _output_tokens(self, record: Record, told: Told, unit: int, answer: list[int]) -> int:
        if answer and unit > 1:
            return max(1, (len(answer) - 1) // unit)  # without the one that ends it
        if told.output_tokens is not None:
            return told.output_tokens
        return record.tokens("output_length", TOKEN_LINES.max_tokens) if record.has("output_length") else len(answer)

    def _as_counted(self, request: LiveRequest, told: Told, unit: int) -> LiveRequest:
        """Return a request whose cached tokens are in its own tokens; count it if these are not the server's."""
        if told.prompt_tokens in (None, request.prompt_tokens):
            return request
        if unit > 1 and told.cached_tokens is not None and told.prompt_tokens:
            share = min(1.0, told.cached_tokens / told.prompt_tokens)
            return request._replace(cached_tokens=round(share * request.prompt_tokens))
        self.other_lengths += unit == 1
        return request

    def _salted(self, keys: list[int]) -> list[bytes]:
        key = self._salt.key
        return [key(one.to_bytes(16, "big")) for one in keys]


def _answer(record: Record) -> list[int]:
    """Return the tokens of a line's answer, of the first one if there are several; [] if it does not have them."""
    if not record.has("output_token_ids"):
        return []
    if record.has("n") and record.fields["n"] != 1:
        return next(iter(record.integer_lists("output_token_ids")), [])
    return record.integers("output_token_ids")
