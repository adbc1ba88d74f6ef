"""AIPerf's ``inputs.json``: the payloads of all requests of a benchmark, by session.

The format is that of AIPerf's guide "Working with Profile Export Files" (ai-dynamo/aiperf).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

from kvsim.trace.base import Trace
from kvsim.trace.openai import output_tokens_of, prompt_of, read_messages
from kvsim.trace.records import Record
from kvsim.trace.text import TextTrace, Turn
from kvsim.trace.tokenizer import Tokenizer

NOTE = "answers between the turns of a session are not in the file, so that later prompts lack them"


@dataclass(kw_only=True)
class AIPerfInputs(TextTrace):
    """Reads ``{"data": [{"session_id", "payloads": [...]}, ...]}``, one JSON object, plain or compressed.

    A payload is the body of a request: ``messages``, ``prompt``, ``text_input`` or ``input`` as text, or token ids. Its answer
    has the payload's ``max_tokens`` (``max_completion_tokens``), or ``output_tokens``. A session's payloads are its turns; one
    whose messages do not begin with those before it has only what its turn adds, and then continues them, without the answers
    in between, which the file does not contain (``Trace.note``). ``limit`` counts sessions.
    """

    IS_LINE: ClassVar[bool] = False

    def load(self, page_tokens: int) -> Trace:
        self._lacks_answers = False
        trace = super().load(page_tokens)
        trace.note = "; ".join(note for note in (trace.note, NOTE if self._lacks_answers else "") if note)
        return trace

    def turns(self, record: Record, tokenizer: Tokenizer) -> Iterator[Turn]:
        for number, fields in enumerate(islice(record.items("data"), self.limit)):
            part = Record(record.path, record.line, fields)
            session = part.name("session_id") if part.has("session_id") else f"session {number}"
            known: list[dict[str, Any]] = []
            for payload in part.items("payloads"):
                body = Record(record.path, record.line, payload)
                known = self._continued(known, body)
                prompt, is_plain = prompt_of(body, tokenizer, known or None)
                length = output_tokens_of(body, body, self.output_tokens)
                yield Turn(record, prompt, None, length, is_plain, {"session_id": session})

    def _continued(self, known: list[dict[str, Any]], body: Record) -> list[dict[str, Any]]:
        """Return the messages of a payload with those before it; none if it has no messages."""
        own = read_messages(body) if body.has("messages") else []
        if not known or not own or own[: len(known)] == known:
            return own
        self._lacks_answers = True
        return [*known, *own]
