"""Ways to copy pages that a study compares with kvsim's: each moves the right bytes, in both directions, and no others."""

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvsim.hardware.copy_rule import CopyRule  # noqa: E402
from kvsim.substrate.hardware.memory.page_list import upload_page_lists  # noqa: E402
from kvsim.substrate.hardware.memory.tier_copy import WAYS, TierCopy  # noqa: E402

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "hardware"
PARTS = ("copies", "copy_kernels", "copy_engines", "copy_jobs", "copy_variants")
Loaded = dict[str, ModuleType]
FRAGMENT_BYTES, LAYERS, PAGES = 2048, 3, 12


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loaded]:
    """The study's modules by name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield {name: importlib.import_module(name) for name in PARTS}
    for name in PARTS:
        sys.modules.pop(name, None)


def pools(unit_pages: int = 1) -> TierCopy:
    gpu = torch.randint(0, 256, (LAYERS, PAGES, FRAGMENT_BYTES), dtype=torch.uint8)
    host = torch.randint(0, 256, (PAGES // unit_pages, LAYERS, unit_pages * FRAGMENT_BYTES), dtype=torch.uint8)
    return TierCopy(gpu, host, CopyRule(), unit_pages=unit_pages)


GPU_PAGES, HOST_PAGES = np.array([8, 9, 0, 1, 4, 5]), np.array([2, 3, 10, 11, 6, 7])
"""Runs of two neighbours."""


def expected(tiers: TierCopy, way: str, host_pages: np.ndarray) -> torch.Tensor:
    """The target pool after the copy."""
    if way == "load":
        after = tiers.gpu.clone()
        after[GPU_PAGES.tolist()] = tiers.host[host_pages.tolist()]
    else:
        base = tiers.host.untyped_storage()
        after = torch.tensor(base.tolist(), dtype=torch.uint8).as_strided(tiers.host.shape, tiers.host.stride())
        for gpu_page, host_page in zip(GPU_PAGES.tolist(), host_pages.tolist(), strict=True):
            after[host_page] = tiers.gpu[gpu_page]  # starts of larger pages overlap
    return after


@pytest.mark.parametrize("name", ["each", "pages", "runs", "batch", "merged"])
@pytest.mark.parametrize("way", WAYS)
def test_copy_engines_are_given_the_right_addresses(study: Loaded, name: str, way: str) -> None:
    tiers = pools()
    after = expected(tiers, way, HOST_PAGES)
    getattr(study["copy_engines"].Engines(tiers, way, GPU_PAGES, HOST_PAGES, 2), name)()
    assert torch.equal(tiers.gpu if way == "load" else tiers.host, after)


@pytest.mark.parametrize("way", WAYS)
def test_runs_of_tokens_in_larger_pages_are_merged(study: Loaded, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger pages of four: neighbours on both sides are one copy in each layer."""
    tiers, copied = pools(unit_pages=4), list[int]()
    job = study["copy_jobs"].Job(None, tiers, way, GPU_PAGES, HOST_PAGES, 2, 1e9)
    indices = job.host_indices()
    after = expected(tiers, way, indices)
    move = study["copy_engines"].copy_batch
    merged = sys.modules[move.__module__].merged

    def counted(targets: np.ndarray, sources: np.ndarray, n_bytes: int) -> tuple[np.ndarray, ...]:
        found = merged(targets, sources, n_bytes)
        copied.extend(found[2].tolist())
        return found  # type: ignore[no-any-return]

    monkeypatch.setattr(sys.modules[move.__module__], "merged", counted)
    study["copy_engines"].Engines(tiers, way, GPU_PAGES, indices, 2).merged()
    assert torch.equal(tiers.gpu if way == "load" else tiers.host, after)
    assert copied == [2 * FRAGMENT_BYTES] * (3 * LAYERS)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [{"programs": 3, "tile_bytes": 1024}, {"programs": 1, "tile_bytes": 4096, "stages": 1}])
def test_kernels_copy_tiles_of_any_size(study: Loaded, way: str, shape: dict[str, int]) -> None:
    kernels, tiers = study["copy_kernels"], pools()
    after = expected(tiers, way, HOST_PAGES)
    lists = upload_page_lists(GPU_PAGES, HOST_PAGES, device=torch.device("cpu"))
    sides = [(tiers.gpu, lists[0]), (tiers.host, lists[1])]
    kernels.copy_tiles(*(sides[::-1] if way == "load" else sides), kernels.Shape(**shape, pace=0.5), 1e9)
    assert torch.equal(tiers.gpu if way == "load" else tiers.host, after)


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_that_does_nothing_or_misses_a_page_is_found(study: Loaded, way: str) -> None:
    copies, jobs, engines = (study[name] for name in ("copies", "copy_jobs", "copy_engines"))
    machine = copies.Machine(LAYERS * PAGES * FRAGMENT_BYTES)
    tiers = TierCopy(*machine.pools(FRAGMENT_BYTES, LAYERS), CopyRule())
    job = jobs.Job(machine, tiers, way, GPU_PAGES, HOST_PAGES, 2, 1e9)
    assert job.check(engines.Engines(tiers, way, GPU_PAGES, HOST_PAGES, 2).pages)
    assert not job.check(lambda: None)
    assert not job.check(engines.Engines(tiers, way, GPU_PAGES[:-1], HOST_PAGES[:-1], 1).pages)


def test_tables_have_a_line_for_each_case_and_a_column_for_each_way(study: Loaded) -> None:
    rows = [
        {"run": run, "name": name, "share": share}
        for run, name, share in ((1, "kernel", 0.5), (1, "pages", 0.25), (2, "pages", 1.0))
    ]
    text = study["copy_variants"].pivot(rows, ("run",), "name", ("share",))
    assert text.splitlines()[2:] == ["| 1 | 0.500 | 0.250 |", "| 2 |  | 1.000 |"]


def test_a_way_that_fails_is_noted_and_the_others_go_on(study: Loaded) -> None:
    variants, machine = study["copy_variants"], study["copies"].Machine(1 << 16)
    measuring = variants.Study(machine, argparse.Namespace(tiny=True, seconds=60), {})

    def fails() -> dict[str, float]:
        raise RuntimeError("CUDA driver call failed with error 1\nmore")

    measuring.table = lambda: (row for fetch in (fails, lambda: {"share": 0.5}) for row in measuring.measured("it", fetch))
    assert measuring.rows("table") == [{"share": 0.5}]
    assert measuring.failed == {"it": "RuntimeError: CUDA driver call failed with error 1"}
    measuring.table = lambda: (1 // number for number in (1, 0, 1))
    assert measuring.rows("table") == [1] and "rest of table" in measuring.failed


def test_tables_that_are_measured_anew_replace_those_of_an_earlier_file(study: Loaded, tmp_path: Path) -> None:
    variants, path = study["copy_variants"], tmp_path / "copy_variants.json"
    runs = [{"tables": ["beside", "alone"], "rates": {"load": 1.0}}, {"tables": ["coarse"], "rates": {"load": 2.0}}]
    path.write_text(json.dumps({"device": "H", "runs": runs, "beside": [1], "alone": [2], "coarse": [3]}))
    found = variants.earlier(path, "H", variants.table_names("alone,coarse"))
    assert found["runs"] == [{"tables": ["beside"], "rates": {"load": 1.0}}] and found["beside"] == [1]
    with pytest.raises(SystemExit, match="was measured on H, not on A"):
        variants.earlier(path, "A", ["alone"])
    with pytest.raises(argparse.ArgumentTypeError, match="there is no table some"):
        variants.table_names("alone,some")
