"""``kvsim trace convert``: writes a trace as block ids that can be passed on."""

from collections.abc import Sequence
from pathlib import Path

from kvsim.errors import UsageError
from kvsim.files.writing import replacing
from kvsim.numbers import LONGEST_TEXT, Whole, refusal
from kvsim.plans.build import build_trace
from kvsim.settings.configuration import compose, quoted
from kvsim.trace.base import TraceSource
from kvsim.trace.convert import as_lines, compressed
from kvsim.trace.formats import load_source

USAGE = """\
usage: kvsim trace convert FILE OUT [--block-tokens N] [--runs] [KEY=VALUE ...]

Writes the requests of FILE (- is standard input) to OUT in Mooncake's format: arrivals, lengths, sessions, priorities, and ids of
blocks, which reveal only which prompts share a prefix. No text and no tokens are written. OUT may end in .gz or .zst.

--block-tokens N   tokens per block; OUT can be replayed with pages of any multiple of N, with the same hits as FILE. By default
                   the size of FILE's own blocks, or 16
--runs             write runs of ids (hash_ids_rle), which only kvsim reads: for very long prompts"""

BLOCK_TOKENS = "--block-tokens"
DEFAULT_BLOCK_TOKENS = 16


def convert(arguments: Sequence[str]) -> None:
    """Convert a trace. Raises UsageError, and then leaves no file behind."""
    words = [word for word in arguments if "=" not in word or word.startswith(BLOCK_TOKENS)]
    overrides = [word for word in arguments if word not in words]
    packed, block_tokens, paths = _options(words)
    if len(paths) != 2:
        raise UsageError("kvsim trace convert needs FILE and OUT: see kvsim trace convert --help")
    path, out = paths
    if not path or not out:
        raise UsageError(f"kvsim trace convert: {'OUT' if path else 'FILE'} is empty; name a file")
    if Path(out).exists() and path != "-" and Path(out).samefile(path):
        raise UsageError(f"{out} is the trace itself; choose another name for the converted one")
    source, _ = build_trace(compose([*overrides, f"trace.path={quoted(path) if path != '-' else path}"]))
    _check(source)
    size = block_tokens or getattr(source, "block_tokens", None) or DEFAULT_BLOCK_TOKENS
    trace = load_source(source, size)
    with replacing(Path(out)) as file, compressed(out, file) as stream:
        for line in as_lines(trace, packed=packed):
            stream.write(line)
    blocks = sum(request.prompt_pages for request in trace.requests)
    print(f"{out}: {len(trace.requests):,} requests, {blocks:,} blocks of {size} tokens, {Path(out).stat().st_size:,} bytes")
    if trace.note:
        print(f"In this trace, {trace.note}.")
    print(f"Replay it with: kvsim replay trace.path={out} page_tokens={size}")


def _options(words: Sequence[str]) -> tuple[bool, int | None, list[str]]:
    """Return whether ids are packed, the size of blocks if given, and the paths."""
    packed, block_tokens, paths = False, None, []
    rest = iter(words)
    for word in rest:
        if word.partition("=")[0] == BLOCK_TOKENS:
            value = word.partition("=")[2] or next(rest, "")
            number = int(value) if value.isdecimal() and len(value) <= LONGEST_TEXT else value
            if not Whole(1).holds(number):
                raise UsageError(refusal(BLOCK_TOKENS, Whole(1), number, hint="it is a number of tokens"))
            block_tokens = number
        elif word == "--runs":
            packed = True
        elif word.startswith("-") and word != "-":
            raise UsageError(f"kvsim trace convert has no option {word}: see kvsim trace convert --help")
        else:
            paths.append(word)
    return packed, block_tokens, paths


def _check(source: TraceSource) -> None:
    """Raise UsageError for settings that the converted trace could not keep."""
    if source.bigram:
        raise UsageError("trace.bigram must be false: blocks cannot be known by the token after them")
    answers = getattr(source, "answers", "none")
    if answers != "none":
        raise UsageError(f"trace.answers={answers} would not be kept: set it when the converted trace is read")
