"""AIPerf's ``profile_export.jsonl``: a line for each request of a benchmark, with its lengths and times, without its prompt.

The format is that of AIPerf's guide "Working with Profile Export Files" (ai-dynamo/aiperf).
"""

from collections.abc import Iterator

from kvsim.numbers import Whole
from kvsim.trace.length_logs import Asked, LengthLog, count
from kvsim.trace.records import Record

NANOSECONDS = Whole(0, 2**63 - 1)
PROMPT = ("usage_prompt_tokens", "input_sequence_length")
OUTPUT = ("usage_completion_tokens", "output_sequence_length")
"""Measures: what the server counted and, without that, what AIPerf did."""
WARMUP = "warmup"


def read(record: Record, max_tokens: int) -> Iterator[Asked]:
    """Yield the request of a line; none for one that failed, was cancelled or was sent to warm up."""
    about = record.part("metadata")
    is_warmup = about.has("benchmark_phase") and str(about.name("benchmark_phase")).lower() == WARMUP
    if is_warmup or record.has("error") or about.flag("was_cancelled"):
        return
    metrics = record.part("metrics")
    prompt_tokens = _measured(metrics, PROMPT, max_tokens)
    if not prompt_tokens:
        return
    session = next((name for name in ("x_correlation_id", "conversation_id") if about.has(name)), "")
    output_tokens = _measured(metrics, OUTPUT, max_tokens)
    yield Asked(
        arrival_s=about.integer("request_start_ns", NANOSECONDS) / 1e9,
        prompt_tokens=prompt_tokens,
        output_tokens=1 if output_tokens is None else output_tokens,
        session=about.name(session) if session else None,
        kind="",
    )


def _measured(metrics: Record, names: tuple[str, ...], max_tokens: int) -> int | None:
    """Return the first of these measures that a line has."""
    name = next((name for name in names if metrics.has(name)), None)
    return None if name is None else count(metrics, name, metrics.part(name).fields.get("value"), max_tokens)


AIPERF_RESULTS = LengthLog("AIPerf's profile_export.jsonl", ("metadata.request_start_ns", "metrics"), read)
