"""``kvsim calibrate`` writes a hardware file that a simulation takes; without a GPU it measures the interpreter and says so."""

import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
from omegaconf import OmegaConf

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from kvsim.cli import main
from kvsim.commands.hardware_file import COMMENTS, number, written
from kvsim.engine.substrate import Work
from kvsim.hardware.spec import HardwareSpec, RemoteStore
from kvsim.model.spec import ModelSpec
from kvsim.plans.construct import construct
from kvsim.substrate.simulated.noise import KINDS
from kvsim.substrate.simulated.substrate import SimulatedSubstrate

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: measuring it takes minutes")


def read(path: Path, kind: type) -> object:
    return construct(kind, OmegaConf.to_container(OmegaConf.create(path.read_text())), path.stem)


@interpreted
@pytest.mark.long
def test_the_file_is_a_machine_that_a_simulation_takes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "name=mine", f"output={folder}"]) == 0
    assert [path.name for path in folder.iterdir()] == ["mine.yaml"]
    shown = capsys.readouterr().out
    assert "There is no GPU: these numbers describe Triton's interpreter" in shown
    assert "Page copies" in shown and "Attention of a chunk" in shown
    text = (folder / "mine.yaml").read_text()
    assert text.startswith("# Triton's interpreter, no GPU, measured by kvsim calibrate")
    assert max(map(len, text.splitlines())) <= 130

    spec = read(folder / "mine.yaml", HardwareSpec)
    assert isinstance(spec, HardwareSpec) and spec.link_curves and spec.disk_curves and spec.compute_curves
    assert [row[0] for row in spec.link_curves.host_to_device] == [512, 1024]
    assert spec.copy_rule and spec.copy_rule.programs in (1, 2)
    assert spec.copy_rule.store_beside_load_bytes_per_s < spec.both_directions_bytes_per_s
    assert spec.disk_curves.both and len(spec.disk_curves.both) == 6
    page_sizes = (12288, 16384, 65536)  # the first is the model's
    assert [row[:2] for row in spec.disk_curves.read] == [[depth, size] for depth in (1, 2) for size in page_sizes]
    assert [row[:2] for row in spec.compute_curves.prefill_attention] == [[4, 1], [4, 16], [8, 2], [8, 16], [32, 8], [32, 32]]
    assert "  prefill_tile_tokens: 1\n  rested_prefill_share: 1.0\n" in text
    assert [row[0] for row in spec.compute_curves.decode_attention] == [4096, 16384]
    model = read(Path(str(files("kvsim.conf"))) / "model" / "tiny.yaml", ModelSpec)
    assert isinstance(model, ModelSpec)
    simulated = SimulatedSubstrate(model, replace(spec, noise=None), 16, links="fifo")
    step_s = simulated.steps.leap_s(Work(decode_requests=1, decode_context_tokens=16), 1)
    products_s = model.linear_flops_per_token + model.sampling_flops_per_token
    decode_s = model.layers * 4096 / spec.compute_curves.decode_attention[0][1]
    parts_s = products_s / spec.compute_curves.linear[0][1] + decode_s
    assert step_s == pytest.approx(parts_s + spec.step_overhead_s + spec.leap_overhead_s, rel=1e-2)
    assert spec.noise and all(
        (kind := getattr(spec.noise, name)).each[5][0] == 0.5 and len(kind.each) == 13 and 0 <= kind.run < 1 for name in KINDS
    )
    assert "Noise: factors of durations" in shown and "  prefill_steps:\n    run: " in text and "\n  seed: 0\n" in text
    assert min(spec.step_overhead_s, spec.prefill_overhead_s, spec.prefill_launch_s) >= 0
    assert 0 <= spec.compute_curves.repeated_context_share <= 1 and "decode attention, repeated / own context" in shown
    assert min(spec.leap_overhead_s, spec.copy_overhead_s, spec.copy_launch_s, spec.copy_leap_s) >= 0
    assert "extra overhead of decode steps in a row, µs" in shown and "extra latency of copies while serving, µs" in shown


HYBRID = {
    "layers": 2, "recurrent_layers": 1, "state_heads": 2, "state_key_dim": 8, "state_value_dim": 16, "recurrent_in_width": 82,
    "conv_channels": 48, "conv_width": 4, "state_flops_per_element": 5.0,
}  # fmt: skip
"""A page of 512 bytes, a state of 1,600."""


@interpreted
@pytest.mark.long
def test_a_hybrid_model_measures_its_recurrences(folder: Path) -> None:
    words = [f"{'' if name == 'layers' else '+'}model.{name}={value}" for name, value in HYBRID.items()]
    assert main(["calibrate", "name=mine", f"output={folder}", "model=tiny", *words]) == 0
    spec = read(folder / "mine.yaml", HardwareSpec)
    assert isinstance(spec, HardwareSpec) and spec.compute_curves
    assert [row[0] for row in spec.compute_curves.scan or ()] == [4, 8]
    assert [row[0] for row in spec.compute_curves.state_update or ()] == [2 * 1600, 2 * 2 * 1600]
    plain = read(Path(str(files("kvsim.conf"))) / "model" / "tiny.yaml", ModelSpec)
    assert isinstance(plain, ModelSpec)
    steps = SimulatedSubstrate(replace(plain, **HYBRID), spec, 16, links="fifo").steps
    decode, chunk = Work(decode_requests=1, decode_context_tokens=16), Work(chunks=[(8, 0)])
    assert steps.leap_s(decode, 1) > 3200 / (spec.compute_curves.state_update or [])[0][1]
    assert steps.leap_s(chunk, 1) > 8 * 256 / (spec.compute_curves.scan or [])[1][1]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["trace=mooncake"], "trace: there is no such setting; the configuration has hardware, model, name, overwrite, o"),
        (["name=My-GPU"], "name must start with a lower-case letter, then lower-case letters, digits and underscores, not"),
        (["name=h200"], ".*hardware/h200.yaml already exists: choose another name=NAME, or set overwrite=true"),
        (["output=nowhere"], "output: there is no folder nowhere"),
        (["disk=nowhere"], "disk: there is no folder nowhere"),
        (["page_tokens=0"], "page_tokens must be at least 1, not 0"),
        (["model=tiny", "model.kv_dtype_bytes=1", "output=."], r"model: kv_dtype_bytes must be 2 \(bf16\) or 4 \(float32\)"),
        (["-m", "seed=1,2"], "-m: kvsim calibrate takes a single configuration: leave out -m"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_ends_with_one_line_before_anything_is_measured(
    arguments: list[str], problem: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *arguments]) == 2
    shown = capsys.readouterr()
    assert re.match(f"kvsim: {problem}", shown.err)
    assert shown.err.count("\n") == 1 and shown.out == ""
    assert not list(folder.iterdir())


@interpreted
def test_a_large_model_is_not_interpreted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "model.layers=31", "output=."]) == 2
    assert capsys.readouterr().err == "kvsim: model: 7.8 billion weights are too many without a GPU: set model=tiny\n"
    assert not list(folder.iterdir())


def test_a_file_is_replaced_if_that_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "measured.yaml").write_text("before")
    assert main(["calibrate", "output=.", "disk=nowhere"]) == 2
    assert capsys.readouterr().err.startswith("kvsim: measured.yaml already exists")
    assert main(["calibrate", "output=.", "disk=nowhere", "overwrite=true"]) == 2
    assert capsys.readouterr().err == "kvsim: disk: there is no folder nowhere\n"
    assert (folder / "measured.yaml").read_text() == "before"


@pytest.mark.parametrize("name", ["linear", "h200_measured_hybrid"])
def test_every_number_of_a_machine_is_written_with_its_comment(name: str) -> None:
    settings = OmegaConf.to_container(OmegaConf.create((files("kvsim.conf") / "hardware" / f"{name}.yaml").read_text()))
    machine = construct(HardwareSpec, settings, "hardware")
    with_store = replace(machine, remote=RemoteStore(bytes_per_s=1e9, latency_s=5e-3))
    text = written(with_store, "# a machine", COMMENTS)
    read_again = construct(HardwareSpec, OmegaConf.to_container(OmegaConf.create(text)), "hardware")
    assert read_again.memory_bytes == machine.memory_bytes and read_again.flops_per_s == pytest.approx(
        machine.flops_per_s, rel=1e-3
    )
    assert read_again.remote is None  # its rates are settings of its tier


@pytest.mark.parametrize(
    ("value", "text"), [(7, "7"), (1.0, "1.0"), (0.0, "0.0"), (0.25, "0.25"), (5e10, "5.000e+10"), (1e-5, "1.000e-05")]
)
def test_numbers_are_numbers_to_every_reader(value: float, text: str) -> None:
    assert number(value) == text
