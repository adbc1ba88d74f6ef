"""What a server makes of text: prompts to tokens, and tokens of answers to text."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvsim.errors import UsageError
from kvsim.trace.tokenizer import TemplateError, Tokenizer

KEY = "serve.tokenizer"
LEAST_WORDS = 10
"""A vocabulary with fewer words that keep their tokens is used whole."""


class Texts:
    """A model's tokenizer and chat template, from a folder in Hugging Face's layout."""

    def __init__(self, folder: str) -> None:
        """Raises UsageError for a folder that cannot be used."""
        self.folder = folder
        self._tokenizer = Tokenizer(folder, KEY)
        words = self._tokenizer.words()
        self.words = words if len(words) >= LEAST_WORDS else self._tokenizer.plain_tokens()
        """The tokens that answers consist of. A client that sends an answer back sends these tokens, if words keep them."""

    def tokens(self, text: str, *, is_plain: bool = True) -> list[int]:
        """Return the tokens of a text; a plain one gets the tokenizer's own tokens in front."""
        self._tokenizer.encode_all([text])
        return [*(self._tokenizer.begin if is_plain else ()), *self._tokenizer.encode(text)]

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[int]:
        """Return the tokens of a conversation. Raises ValueError for one that the template refuses, and without a template."""
        try:
            return self.tokens(self._tokenizer.render([_flat(one) for one in messages], tools), is_plain=False)
        except UsageError as error:
            raise TemplateError(str(error)) from None

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return self._tokenizer.decode(tokens)


def _flat(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose parts of text are one text, as servers pass it to templates of text models."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    texts = [str(part.get("text", "")) for part in parts if isinstance(part, dict) and part.get("type", "text") == "text"]
    return {**message, "content": "\n".join(texts)}
