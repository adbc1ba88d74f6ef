"""Blocks have the hashes that the engines' own code gives them."""

from kvsim.kv_events.hashes import sglang_digest, sglang_told, vllm_digest, vllm_told

FIRST, SECOND = [10, 11, 12, 13], [14, 15, 16, 17]


def test_vllm_s_hashes() -> None:
    """As ``hash_block_tokens`` with ``sha256`` and ``maybe_convert_block_hash`` of vLLM 0.33 return them."""
    first = vllm_digest(None, FIRST)
    told = [first, vllm_digest(first, SECOND), vllm_digest(None, FIRST, "mine")]
    assert [vllm_told(digest) for digest in told] == [4910175699492360673, 1028229616873232029, 7745861952734518122]
    assert vllm_digest(first, SECOND, "mine") == told[1], "a salt is in the first block alone"


def test_sglang_s_hashes() -> None:
    """As ``get_hash_str`` and ``hash_str_to_int64`` of SGLang 0.5.9 return them."""
    first = sglang_digest(None, FIRST)
    assert [sglang_told(first), sglang_told(sglang_digest(first, SECOND))] == [5428511633061281808, -13757886277339546]
    assert sglang_digest(None, FIRST, "mine") not in (first, sglang_digest(None, FIRST, "yours"))
