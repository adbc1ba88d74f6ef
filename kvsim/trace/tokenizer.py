"""A model's tokenizer and chat template, from a folder in Hugging Face's layout.

Templates are rendered as transformers renders them (``utils/chat_template_utils.py``), in Jinja's sandbox. Only the date is
fixed, so that a trace is the same on every day.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from kvsim.errors import UsageError
from kvsim.hub import find_model, not_cached

VOCABULARY, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
TODAY = datetime(2024, 7, 26)
"""The date that templates see; Llama 3.1's template has it as its default."""
MOST_KEPT = 200_000
"""Encoded pieces of text kept in memory."""
WORD = re.compile(r" [A-Za-z]+")
LOCAL = {None, "NFC", "NFD", "NFKC", "NFKD", "Replace", "Lowercase", "ByteLevel", "Split", "Digits", "Punctuation", "Whitespace"}
"""Normalizers and pre-tokenizers that treat a piece of text alike wherever it stands."""


def model_files(folder: str) -> list[str]:
    """Return the files of a folder that determine the tokens of a conversation."""
    paths = (find_model(folder) / name for name in (VOCABULARY, CONFIG, TEMPLATE))
    return [str(path) for path in paths if path.is_file()]


class TemplateError(ValueError):
    """The chat template cannot render a conversation."""


class Tokenizer:
    """Turns conversations into text, and text into token ids. Raises UsageError for a folder that cannot be used.

    Text is cut at special tokens, where every tokenizer cuts it first, and each distinct piece is encoded once: the parts that
    prompts of a conversation share cost nothing again. A tokenizer that treats the beginning of a text in its own way (a space
    put in front, as in Llama 2) gets whole texts instead.
    """

    def __init__(self, folder: str, key: str = "trace.tokenizer") -> None:
        """``key`` is the setting that names the folder."""
        try:
            from tokenizers import Tokenizer as Encoder
        except ImportError:
            raise UsageError(f"{key}: text needs the package tokenizers: pip install kvsim[text]") from None
        self._folder = find_model(folder)
        path = self._folder / VOCABULARY
        if not path.is_file():
            raise UsageError(
                f"{key}: {path} does not exist{not_cached(folder)}; name the folder of a model with its tokenizer.json"
            )
        self._key = key
        description = _read_json(path, key)
        try:
            self._encoder = Encoder.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise UsageError(f"{key}: {path}: {' '.join(str(error).split())}") from None
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self._cuts = _cuts(description)
        self._ids: dict[str, list[int]] = {}
        self._template: Any = None
        self._names: dict[str, Any] = {}
        self.begin = self._beginning()
        """Tokens in front of a plain prompt, such as the one that begins a text."""

    def encode_all(self, texts: Iterable[str]) -> None:
        """Encode the pieces of texts that are not known yet, in parallel, for ``encode``."""
        if len(self._ids) > MOST_KEPT:
            self._ids.clear()
        new = list({piece for text in texts for piece in self._pieces(text) if piece not in self._ids})
        encoded = self._encoder.encode_batch_fast(new, add_special_tokens=False)
        self._ids.update((piece, encoding.ids) for piece, encoding in zip(new, encoded, strict=True))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text given to ``encode_all`` last."""
        return [token for piece in self._pieces(text) for token in self._ids[piece]]

    def encode_answer(self, prompt: str | Sequence[int], answer: str) -> list[int]:
        """Return the token ids of an answer to this prompt; both texts were given to ``encode_all`` last."""
        return self.encode(answer)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        text: str = self._encoder.decode(list(tokens), skip_special_tokens=True)
        return text

    def plain_tokens(self) -> list[int]:
        """Return the tokens that stand for text, ascending."""
        return sorted(token for token in self._encoder.get_vocab().values() if self.decode([token]))

    def words(self) -> list[int]:
        """Return the tokens that are a space and a word, ascending: a text of them is encoded as these tokens again."""
        tokens = sorted(self._encoder.get_vocab().values())
        texts = self._encoder.decode_batch([[token] for token in tokens], skip_special_tokens=False)
        pairs = [(token, text) for token, text in zip(tokens, texts, strict=True) if WORD.fullmatch(text)]
        encoded = self._encoder.encode_batch_fast([text for _, text in pairs], add_special_tokens=False)
        return [token for (token, _), encoding in zip(pairs, encoded, strict=True) if encoding.ids == [token]]

    def _pieces(self, text: str) -> list[str]:
        return [piece for piece in self._cuts.split(text) if piece] if self._cuts else [text]

    def _beginning(self) -> list[int]:
        plain, whole = (self._encoder.encode("a", add_special_tokens=special).ids for special in (False, True))
        at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
        return list(whole[:at])

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, with_prompt: bool = True) -> str:
        """Return the text of a conversation; ``with_prompt`` appends what comes in front of an answer.

        Raises UsageError if there is no chat template, and TemplateError for a conversation that it refuses.
        """
        if self._template is None:
            self._template, self._names = self._read_template()
        try:
            text: str = self._template.render(messages=messages, tools=tools, add_generation_prompt=with_prompt, **self._names)
        except Exception as error:  # a template is a program, and conversations may be anything
            raise TemplateError(
                f"the chat template of {self._folder} refuses this conversation: {error or type(error).__name__}"
            ) from None
        return text

    def _read_template(self) -> tuple[Any, dict[str, Any]]:
        """Return the chat template and the special tokens that it may name."""
        import jinja2

        path = self._folder / CONFIG
        config = _read_json(path, self._key) if path.is_file() else {}
        own = self._folder / TEMPLATE
        source = own.read_text(encoding="utf-8") if own.is_file() else config.get("chat_template")
        if isinstance(source, list):
            source = next((item["template"] for item in source if item.get("name") == "default"), None)
        if not isinstance(source, str):
            raise UsageError(f"{self._key}: {self._folder} has no chat template: it must be in {TEMPLATE} or {CONFIG}")
        try:
            template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise UsageError(f"{self._key}: the chat template of {self._folder} is not valid: {error}") from None
        tokens = {name: value for name, value in config.items() if name.endswith("_token")}
        return template, {name: value["content"] if isinstance(value, dict) else value for name, value in tokens.items()}


def _read_json(path: Path, key: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{key}: {path} is not JSON: {error}") from None
    return content if isinstance(content, dict) else {}


def _cuts(description: Mapping[str, Any]) -> re.Pattern[str] | None:
    """Return the special tokens at which text may be cut; None if it must be encoded as a whole."""
    tokens = [token for token in description.get("added_tokens") or () if token.get("special")]
    parts = [part for name in ("normalizer", "pre_tokenizer") for part in _parts(description.get(name))]
    is_local = all(part.get("type") in LOCAL and not part.get("add_prefix_space") for part in parts)
    if not tokens or not is_local or any(token.get(name) for token in tokens for name in ("lstrip", "rstrip", "single_word")):
        return None
    longest_first = sorted((token["content"] for token in tokens), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})")


def _parts(step: Any) -> list[dict[str, Any]]:
    """Return a normalizer or pre-tokenizer as the list of its steps."""
    if not step:
        return []
    if step.get("type") == "Sequence":
        return [part for inner in step.get("normalizers") or step.get("pretokenizers") or () for part in _parts(inner)]
    return [step]


def _environment() -> Any:
    """Return the environment in which transformers renders templates: sandboxed, with its additions."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks what an assistant said; only training needs to know."""

        tags = {"generation"}  # noqa: RUF012  (as Jinja has it)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **settings: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **settings)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=raise_exception, strftime_now=TODAY.strftime)
    return environment
