"""Text without a tokenizer: a token is four bytes of it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvsim.trace.tokenizer import Tokenizer

BYTES = "bytes"
"""What stands for this tokenizer in place of a model's folder."""
BYTES_PER_TOKEN = 4
"""English text has about 4 bytes per token of common models (OpenAI's rule of thumb)."""
NOTE = (
    f"tokens are estimates: {BYTES_PER_TOKEN} bytes of text each (trace.tokenizer=bytes), and so are lengths of prompts and "
    "sizes of caches"
)


class ByteTokenizer(Tokenizer):
    """Cuts text every four bytes from its beginning, so that prompts share tokens exactly as far as they share text.

    A conversation is its messages, one after another: a longer one begins with the text of a shorter one and its answer. The last
    bytes of a text, fewer than four, are no token.
    """

    def __init__(self) -> None:
        self.begin = []

    def encode_all(self, texts: Iterable[str]) -> None:
        """Nothing is to be prepared."""

    def encode(self, text: str) -> list[int]:
        return _cut(_bytes(text), 0)

    def encode_answer(self, prompt: str | Sequence[int], answer: str) -> list[int]:
        before = _bytes(prompt) if isinstance(prompt, str) else b""
        return _cut(before + _bytes(answer), len(before) // BYTES_PER_TOKEN) if answer else []

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, with_prompt: bool = True) -> str:
        parts = [_plain(tools)] if tools else []
        parts += [_message(message) for message in messages]
        return "".join(parts) + ("assistant\n" if with_prompt else "")


def open_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer that ``trace.tokenizer`` names. Raises UsageError."""
    return ByteTokenizer() if name == BYTES else Tokenizer(name)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _cut(content: bytes, begin: int) -> list[int]:
    """Return the tokens of a text from number ``begin`` on; one token for a text that is too short for one."""
    whole = len(content) // BYTES_PER_TOKEN
    tokens: list[int] = np.frombuffer(content, dtype="<u4", count=whole)[begin:].tolist()
    return tokens or ([len(content) << 32] if content else [])


def _message(message: Mapping[str, Any]) -> str:
    others = {name: value for name, value in sorted(message.items()) if name not in ("role", "content") and value}
    return f"{message['role']}\n{message.get('content') or ''}{_plain(others) if others else ''}\n"


def _plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
