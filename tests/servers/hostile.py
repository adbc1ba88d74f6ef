"""Files of every client that ``kvsim validate results=`` reads, with the fields that they may have, to be changed."""

from typing import Any

from tests.servers.test_result_files import SGLANG, VLLM, aiperf_line, guidellm_request

SAVED: list[dict[str, Any]] = [
    {"kvsim_observed": 1, "requests": 3, "source": "x", "client": "kvsim", "counters": {"vllm:prefix_cache_hits_total": 16.0},
     "facts": {"engine": "vllm", "version": "0.33.0", "model": "m", "page_tokens": 16, "capacity_tokens": 4096,
               "host_capacity_tokens": 4096, "settings": {"max_num_seqs": 4}},
     "speed": 1.0, "concurrency": 1, "stall_s": 0.1, "is_client_bound": False, "notes": ["a"]},
    {"due_s": 0.0, "sent_s": 0.0, "first_token_s": 0.5, "end_s": 1.0, "token_gaps_s": [0.1, 0.2], "prompt_tokens": 32,
     "output_tokens": 3, "cached_tokens": 16, "tier_tokens": {"device": 16}, "queued_s": 0.1, "prefill_s": 0.2},
    {"due_s": 1.0, "sent_s": 1.0, "first_token_s": 1.5, "end_s": 1.5, "prompt_tokens": 48, "output_tokens": 1},
    {"due_s": 2.0, "sent_s": 2.0, "prompt_tokens": 16, "error": "gone"},
]  # fmt: skip
"""A run that kvsim has saved."""
FLAGS = {
    "page_size": 16,
    "max_total_num_tokens": 4096,
    "version": "0.5.23",
    "model_path": "/a/m",
    "disable_overlap_schedule": True,
}
FILES: dict[str, list[Any]] = {
    "vllm": [VLLM, VLLM | {"latencies": [0.9, 0.5, 0.0], "queue_times": [0.25, None, None], "server_ttfts": [0.2, None, None]}],
    "sglang": [SGLANG | {"server_info": FLAGS}],
    "aiperf": [aiperf_line(number, 10.0 + number, 16, number, conversation_id="a", turn_index=number) for number in range(3)],
    "guidellm": [{"benchmarks": [{"requests": {
        "successful": [guidellm_request(0.1, 9.0, 32), guidellm_request(0.2, 9.5, 48)],
        "errored": [guidellm_request(1.0, 51.0, 16, status="errored", error="refused")], "incomplete": [],
    }}]}],
}  # fmt: skip
"""Files of other clients by their names; all of three requests of 32, 48 and 16 tokens, as the trace of ``requests``."""
