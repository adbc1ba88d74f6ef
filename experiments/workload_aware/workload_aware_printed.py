"""What Wang et al. printed of workload-aware eviction.

The paper (KVCache Cache in the Wild, USENIX ATC 2025, arXiv:2506.02634v4, section 4.3) prints ranges in its text and curves
without numbers in figures 25 to 28. Numbers by capacity are in the documentation of its authors' change to vLLM
(vllm-project/vllm, pull request 22236, features/workload_aware_policy): trace A at 6 requests per second, the first hour to fit
the policy and the second hour measured, prefill only, Qwen2.5 7B on one A800; of the second hour, requests whose session began in
the first are left out.
"""

from typing import NamedTuple

from kvsim.report.reproduction import fetchable

FILES = {"trace_a": fetchable("bailian_a"), "trace_b": fetchable("bailian_b")}
BLOCK_TOKENS = 128
"""The block size in the command that the change to vLLM documents."""


class Printed(NamedTuple):
    """A line of the table of the change to vLLM."""

    lru_ttft_s: float
    aware_ttft_s: float
    lru: float
    """LRU's hit rate."""
    aware: float
    """Workload-aware eviction's."""


BY_BLOCKS = {
    1024: Printed(22.3224, 14.0164, 0.1175, 0.1381),
    2048: Printed(23.5450, 13.4586, 0.1281, 0.1586),
    3072: Printed(21.9699, 10.5945, 0.1407, 0.1753),
    4096: Printed(13.7108, 8.5442, 0.1566, 0.1934),
    5120: Printed(10.2716, 6.0039, 0.1786, 0.2054),
    6144: Printed(7.8778, 5.2834, 0.2068, 0.2245),
    7168: Printed(4.9630, 2.9459, 0.2299, 0.2392),
    8192: Printed(2.2806, 2.2641, 0.2498, 0.2560),
}
"""By GPU blocks; times are means, with the time in the queue."""
OVER_OTHERS, OVER_BEST, SHORTER_TTFT = "8.1 to 23.9%", "1.5 to 3.9%", "28.3 to 41.9%"
"""Of the paper's text: more hits than LRU, FIFO, LFU and S3-FIFO, than the best of these, and shorter TTFT with its queue."""
