"""Text without a tokenizer: pages are cut from its bytes, at so many bytes per token."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvsim.trace.tokenizer import Tokenizer

BYTES_PER_TOKEN = 4
"""English text has about 4 bytes per token of common models (OpenAI's rule of thumb)."""
NOTE = (
    "Text is cut into pages by its bytes, 4 for a token, as shadow.tokenizer is not set: what prompts share is right to a page, "
    "sizes of prompts and caches are estimates."
)


class ByteText(Tokenizer):
    """Takes the place of a model's tokenizer: a token is a byte, and a conversation is its messages, one after another."""

    def __init__(self) -> None:
        self.begin = []

    def encode_all(self, texts: Iterable[str]) -> None:
        """Nothing is to be prepared."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogatepass"))

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, with_prompt: bool = True) -> str:
        parts = [_plain(tools)] if tools else []
        parts += [_message(message) for message in messages]
        return "".join(parts) + ("assistant\n" if with_prompt else "")


def _message(message: Mapping[str, Any]) -> str:
    """Return a message, so that a longer conversation begins with the text of a shorter one and its answer."""
    others = {name: value for name, value in sorted(message.items()) if name not in ("role", "content") and value}
    return f"{message['role']}\n{message.get('content') or ''}{_plain(others) if others else ''}\n"


def _plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
