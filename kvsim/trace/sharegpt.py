"""Conversations in ShareGPT's format."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvsim.trace.openai import text_of
from kvsim.trace.records import Record, shown
from kvsim.trace.text import TextTrace, Turn, conversation
from kvsim.trace.tokenizer import Tokenizer

ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "assistant": "assistant", "model": "assistant", "system": "system", "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
"""Who speaks in ShareGPT, as a chat template calls it."""


@dataclass(kw_only=True)
class ShareGPT(TextTrace):
    """Reads conversations ``{"conversations": [{"from": "human", "value"}, {"from": "gpt", "value"}, ...]}``.

    The file is one JSON array or has one conversation per line, plain or compressed. Each human turn is a request, whose prompt
    is the conversation so far; the turn after it is its answer. All conversations begin at time 0 unless they have a
    ``timestamp`` (ms); each later turn follows the answer before it at once. Conversations without a question are left out.
    ``limit`` counts conversations.
    """

    def turns(self, record: Record, tokenizer: Tokenizer) -> Iterator[Turn]:
        messages = []
        for fields in record.items("conversations"):
            part = Record(record.path, record.line, fields)
            who = part.name("from")
            if who not in ROLES:
                raise record.error(f"from must be one of {', '.join(ROLES)}, not {shown(who)}")
            if "value" not in fields:
                raise record.error("value is missing; it must be text")
            messages.append({"role": ROLES[str(who)], "content": text_of(part, "value")})
        if any(message["role"] == "user" for message in messages):
            yield from conversation(record, messages, tokenizer)
