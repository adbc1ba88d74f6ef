"""Which slots and pages a step reads, verifies and fills, on a cache small enough to follow by hand."""

import numpy as np
import pytest

from kvsim.core.cache import CLAIMED, Cache
from kvsim.core.rules import Rules
from kvsim.engine.job import Job
from kvsim.engine.substrate import Work
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.substrate.hardware.step_pages import StepPages
from tests.core.small import make_tiers
from tests.workloads import make_request

PAGE_TOKENS = 4


def cache(gpu=20, cpu=20):
    tiers, edges = make_tiers((gpu, cpu), [LRU(), LRU()], [WriteThrough()], slots=True, page_tokens=PAGE_TOKENS)
    return Cache(tiers, edges, Rules(), PAGE_TOKENS)


def admitted(cache, pages, *, tokens=1, output=1, **about):
    """A job whose prompt has these pages and some tokens more, with the slots that it needs."""
    request = make_request(pages, prompt_tokens=len(pages) * PAGE_TOKENS + tokens, output_tokens=output, **about)
    job = Job(request, 0.0)
    lease = job.lease = cache.match(request)
    assert cache.admit(lease, -(-(request.prompt_tokens + output) // PAGE_TOKENS), 0.0, lease.lower_pages)
    assert cache.claim(lease, 0.0) == CLAIMED
    job.computed = (lease.gpu_pages + lease.loaded_pages) * PAGE_TOKENS
    return job


def chunk(pages, job, tokens):
    (made,) = pages.chunks(Work(prefilling=[(job, tokens)]))
    job.computed += tokens
    return made


def end(transfers, cache):
    for transfer in transfers:
        assert cache.lower.begin(transfer, 0.0).can_run
        end(cache.lower.finish(transfer, 0.0), cache)


def test_a_prompt_is_filled_page_by_page_as_chunks_complete_them():
    tree, pages = cache(), StepPages(PAGE_TOKENS, caches_output=False)
    job = admitted(tree, [5, 6, 7], tokens=2)
    slots = job.lease.slots.tolist()
    first, second = chunk(pages, job, 6), chunk(pages, job, 8)
    assert (first.start, first.tokens, first.is_sampled, first.slots.tolist()) == (0, 6, False, slots[:2])
    assert (first.filled_ids.tolist(), first.filled_slots.tolist()) == ([5], slots[:1])
    assert (second.start, second.tokens, second.is_sampled, second.slots.tolist()) == (6, 8, True, slots[:4])
    assert (second.filled_ids.tolist(), second.filled_slots.tolist()) == ([6, 7], slots[1:3])
    assert not len(first.reused) and not len(second.reused)


def test_reused_pages_are_verified_with_the_first_chunk_only_and_never_filled():
    tree, pages = cache(), StepPages(PAGE_TOKENS, caches_output=False)
    earlier = admitted(tree, [0, 1])
    chunk(pages, earlier, 9)
    end(tree.insert(earlier.lease, 0.0), tree)
    job = admitted(tree, [0, 1, 2, 3])
    kept = tree.tree.root.children[0].slots[0].tolist()
    first, second = chunk(pages, job, 4), chunk(pages, job, 5)
    assert (first.reused_ids.tolist(), first.slots[first.reused].tolist()) == ([0, 1], kept)
    assert first.filled_ids.tolist() == [2]
    assert second.filled_ids.tolist() == [3] and not len(second.reused)
    assert second.slots[:2].tolist() == kept


def test_pages_that_a_load_did_not_bring_are_filled_with_the_last_chunk():
    tree, pages = cache(), StepPages(PAGE_TOKENS, caches_output=False)
    earlier = admitted(tree, [0, 1, 2])
    end(tree.insert(earlier.lease, 0.0), tree)
    end(tree.finish(earlier.lease, 0.0), tree)
    tree.transfers.eviction.evict(tree.tree.root.children[0], tree.gpu, 0.0)
    job = admitted(tree, [0, 1, 2, 3])
    (load,) = tree.lower.load(job.lease, 0.0).transfers
    first = chunk(pages, job, 4)
    assert first.reused_ids.tolist() == [0, 1, 2], "pages on their way count: the step waits for them"
    tree.lower.abort(load, 1, 0.0)
    last = chunk(pages, job, 1)
    assert last.filled_ids.tolist() == [1, 2] and last.is_sampled


def test_a_request_that_begins_again_is_verified_again():
    tree, pages = cache(), StepPages(PAGE_TOKENS, caches_output=False)
    earlier = admitted(tree, [0, 1])
    tree.insert(earlier.lease, 0.0)
    job = admitted(tree, [0, 1])
    assert len(chunk(pages, job, 1).reused) == 2
    tree.release(job.lease)
    again = job.lease = tree.match(job.request)
    assert tree.admit(again, 3, 0.0)
    job.computed = 8
    assert len(chunk(pages, job, 1).reused) == 2


def test_a_partial_page_with_an_id_is_filled_at_the_prompts_end():
    tree, pages = cache(), StepPages(PAGE_TOKENS, caches_output=False)
    job = admitted(tree, [3, 4])
    job.request.prompt_tokens = 6
    assert chunk(pages, job, 5).filled_ids.tolist() == [3]
    assert chunk(pages, job, 1).filled_ids.tolist() == [4]


def decoding(tree, *, caches_output, output_runs):
    job = admitted(tree, [0, 1], tokens=2, output=9, output_runs=output_runs)
    tree.insert(job.lease, 0.0)
    job.computed, job.generated = 10, 1
    return StepPages(PAGE_TOKENS, caches_output=caches_output), job


def test_a_decoding_request_attends_to_all_its_pages_in_order():
    tree = cache()
    pages, job = decoding(tree, caches_output=False, output_runs=None)
    (item,) = pages.decodes(Work(decoding=[job], decode_step=3, max_steps=4))
    assert item.context_tokens == 13
    assert item.slots.tolist() == [*job.lease.node.slots[0], *job.lease.slots]
    assert not len(item.filled_slots)
    (again,) = pages.decodes(Work(decoding=[job], decode_step=7))
    assert again.slots is None and again.request == item.request, "what has not changed is not sent again"
    job.lease.slots = np.append(job.lease.slots, 19)
    (more,) = pages.decodes(Work(decoding=[job], decode_step=8))
    assert more.slots.tolist()[-1] == 19 and more.request == item.request


@pytest.mark.parametrize(("steps", "filled"), [(1, []), (2, [2]), (5, [2]), (6, [2, 3]), (7, [2, 3])])
def test_an_answers_pages_are_filled_when_steps_complete_them(steps, filled):
    """After 10 tokens the third page lacks two and the fourth six; the fifth has no id."""
    pages, job = decoding(cache(), caches_output=True, output_runs=((2, 2),))
    (item,) = pages.decodes(Work(decoding=[job], max_steps=steps))
    assert item.filled_ids.tolist() == filled
    assert item.filled_slots.tolist() == item.slots[2 : 2 + len(filled)].tolist()
