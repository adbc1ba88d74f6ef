"""Results of ``vllm bench serve --save-result --save-detailed`` and of SGLang's ``bench_serving --output-details``.

A run is one JSON object, whose lists have an element for each request: vllm/benchmarks/serve.py, sglang/bench_serving.py.
"""

from collections.abc import Iterator
from typing import Any

from kvsim.trace.length_logs import Asked, LengthLog, count
from kvsim.trace.records import Record

PROMPTS, OUTPUTS, TIMES, ERRORS = "input_lens", "output_lens", "start_times", "errors"


def read(record: Record, max_tokens: int) -> Iterator[Asked]:
    """Yield the requests of a run; none for those that failed. Without start_times, they arrive at once."""
    prompts = record.items(PROMPTS)
    outputs, times, errors = (_list(record, name, len(prompts)) for name in (OUTPUTS, TIMES, ERRORS))
    for at, tokens in enumerate(prompts):
        prompt_tokens = count(record, f"{PROMPTS}[{at}]", tokens, max_tokens)
        if not prompt_tokens or errors and errors[at]:
            continue
        yield Asked(
            arrival_s=Record(record.path, record.line, {TIMES: times[at]}).number(TIMES) if times else 0.0,
            prompt_tokens=prompt_tokens,
            output_tokens=count(record, f"{OUTPUTS}[{at}]", outputs[at], max_tokens) if outputs else 1,
            session=None,
            kind="",
        )


def _list(record: Record, name: str, length: int) -> list[Any]:
    """Return a list with an element for each request; an empty one if it is absent."""
    found = record.items(name) if record.has(name) else []
    if found and len(found) != length:
        raise record.error(f"{name} has {len(found)} elements, but {PROMPTS} has {length}")
    return found


BENCH_RESULTS = LengthLog("a result of vllm bench serve or SGLang's bench_serving", (PROMPTS, OUTPUTS), read)
