"""Text without a tokenizer: pages are cut from its bytes, at so many bytes per token."""

from collections.abc import Sequence

from kvsim.trace.byte_tokens import BYTES_PER_TOKEN as BYTES_PER_TOKEN
from kvsim.trace.byte_tokens import ByteTokenizer

NOTE = (
    "Text is cut into pages by its bytes, 4 for a token, as shadow.tokenizer is not set: what prompts share is right to a page, "
    "sizes of prompts and caches are estimates."
)


class ByteText(ByteTokenizer):
    """Takes the place of a model's tokenizer: a token is a byte, and a conversation is its messages, one after another."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogatepass"))

    def encode_answer(self, prompt: str | Sequence[int], answer: str) -> list[int]:
        return self.encode(answer)
