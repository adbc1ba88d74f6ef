"""Chained keys of tokens."""

from time import process_time

import numpy as np
import pytest
import xxhash

from kvsim.trace.page_hasher import PageHasher


def words(*tokens):
    return b"".join(token.to_bytes(8, "little") for token in tokens)


def test_a_key_is_the_hash_of_all_tokens_up_to_the_end_of_its_page():
    assert PageHasher(2).keys([7, 8, 9, 10, 11]) == [
        xxhash.xxh3_128_intdigest(words(7, 8)),
        xxhash.xxh3_128_intdigest(words(7, 8, 9, 10)),
    ]


def test_the_unfinished_page_has_a_key_when_asked_for():
    keys = PageHasher(2).keys([7, 8, 9], partial_tail=True)
    assert keys == [xxhash.xxh3_128_intdigest(words(7, 8)), xxhash.xxh3_128_intdigest(words(7, 8, 9))]
    assert PageHasher(2).keys([7, 8], partial_tail=True) == PageHasher(2).keys([7, 8])


@pytest.mark.parametrize("dtype", ["i1", "u1", "<i2", ">i2", "<u4", ">i4", "<i8", ">i8", "<u8", ">u8"])
def test_any_integer_array_has_the_keys_of_its_values(dtype):
    tokens = [1, 2, 3, 4, 5, 127]
    assert PageHasher(2).keys(np.array(tokens, dtype=dtype)) == PageHasher(2).keys(tokens)


def test_arrays_that_are_not_contiguous_and_tuples_are_read_right():
    assert PageHasher(2).keys(np.arange(12)[::3]) == PageHasher(2).keys((0, 3, 6, 9))


def test_a_torch_tensor_is_read_like_an_array():
    torch = pytest.importorskip("torch")
    for dtype in (torch.int32, torch.int64):
        assert PageHasher(2).keys(torch.tensor([3, 4, 5, 6], dtype=dtype)) == PageHasher(2).keys([3, 4, 5, 6])


@pytest.mark.parametrize("tokens", [[1.5, 2.0], np.array([1.0, 2.0]), np.array([[1, 2]]), ["a"], np.array(3)])
def test_what_is_no_list_of_integers_is_refused(tokens):
    with pytest.raises(TypeError):
        PageHasher(1).keys(tokens)


@pytest.mark.parametrize("tokens", [[1, -2], [1 << 63], np.array([1, -2], dtype="i4"), np.array([1 << 63], dtype="u8")])
def test_negative_tokens_and_those_beyond_63_bits_are_refused(tokens):
    with pytest.raises(ValueError, match="tokens must lie in"):
        PageHasher(1).keys(tokens)


def test_a_page_has_at_least_one_token():
    with pytest.raises(ValueError, match="page_tokens must be at least 1, not 0"):
        PageHasher(0)


def test_tenant_and_adapter_enter_every_key():
    hasher, tokens = PageHasher(1), [1, 2, 3]
    variants = [{}, {"tenant": "a"}, {"lora": "a"}, {"tenant": "a", "lora": "a"}, {"tenant": "aa"}, {"tenant": ""}, {"tenant": 0}]
    keys = [key for extra in variants for key in hasher.keys(tokens, **extra)]
    assert len(set(keys)) == len(variants) * len(tokens)


def test_extra_keys_of_different_types_differ_even_if_their_bytes_agree():
    keys = {PageHasher(1).keys([1], tenant=tenant)[0] for tenant in ("A", b"A", 65, "A\0", 65 + (1 << 64), -65)}
    assert len(keys) == 6


def test_no_tokens_can_pass_for_an_extra_key():
    tenant_frame = [(1 << 63 | 2 << 8 | 2) & (1 << 63) - 1, 1, ord("a")]
    assert PageHasher(1).keys([9], tenant="a")[-1] not in PageHasher(1).keys([*tenant_frame, 9])


def test_a_span_enters_the_pages_it_touches_and_all_behind():
    plain = PageHasher(2).keys([0] * 8)
    with_image = PageHasher(2).keys([0] * 8, spans=[(3, 5, "cat")])
    assert [a == b for a, b in zip(plain, with_image, strict=True)] == [True, False, False, False]


def test_a_span_enters_the_second_page_it_touches_too():
    """Equal images up to the end of page 1, another one from page 2 on."""
    short = PageHasher(2).keys([0] * 6, spans=[(2, 4, "cat")])
    long = PageHasher(2).keys([0] * 6, spans=[(2, 6, "cat")])
    assert short[:2] == long[:2]
    assert short[2] != long[2]


def test_spans_with_other_content_or_another_place_within_a_page_have_other_keys():
    variants = [
        [(0, 2, "cat")],
        [(0, 2, "dog")],
        [(0, 1, "cat")],
        [(1, 2, "cat")],
        [(0, 1, "cat"), (1, 2, "cat")],
        [(0, 2, b"cat")],
    ]
    keys = {PageHasher(4).keys([0] * 4, spans=spans)[0] for spans in variants}
    assert len(keys) == len(variants)


@pytest.mark.parametrize("span", [(-1, 2, "cat"), (2, 2, "cat"), (3, 5, "cat")])
def test_a_span_outside_the_prompt_is_refused(span):
    with pytest.raises(ValueError, match="within the prompt of 4 tokens"):
        PageHasher(2).keys([0] * 4, spans=[span])


def test_n_tokens_have_one_bigram_position_less():
    hasher = PageHasher(2, bigram=True)
    assert [len(hasher.keys(list(range(n)))) for n in range(6)] == [0, 0, 0, 1, 1, 2]


def test_a_bigram_page_depends_on_the_token_behind_it():
    hasher = PageHasher(2, bigram=True)
    left, right = hasher.keys([1, 2, 3, 4, 5]), hasher.keys([1, 2, 3, 4, 9])
    assert left[0] == right[0]
    assert left[1] != right[1]
    assert left[0] not in PageHasher(2).keys([1, 2, 2, 3])


def test_a_bigram_page_touches_the_span_of_the_token_behind_it():
    hasher = PageHasher(2, bigram=True)
    plain, with_image = hasher.keys([0] * 7), hasher.keys([0] * 7, spans=[(4, 5, "cat")])
    assert [a == b for a, b in zip(plain, with_image, strict=True)] == [True, False, False]


def test_pages_are_hashed_by_the_million() -> None:
    """Tokens a second, pages of 64 tokens. More than 10 million on an idle machine."""
    tokens = np.random.default_rng(0).integers(0, 100_000, 2_000_000)
    hasher = PageHasher(64)
    best = 0.0
    for _ in range(3):
        began = process_time()
        keys = hasher.keys(tokens)
        best = max(best, len(tokens) / (process_time() - began))
    assert len(keys) == len(tokens) // 64
    assert best > 5e6, f"{best:,.0f} tokens a second"
