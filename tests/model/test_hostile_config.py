"""Whatever a ``config.json`` contains: a model, or one line that names the file."""

import json
from pathlib import Path

import pytest
from hypothesis import given

from kvsim.model.huggingface import HuggingFaceModel
from tests.model.test_huggingface import PUBLISHED
from tests.mutations import few, json_files, refusal


def is_read(path: Path, content: bytes) -> bool:
    """Whether a file is read as a model that can be described."""
    path.write_bytes(content)
    return not refusal(HuggingFaceModel(path=str(path)).note, f"{path}")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_changed_config_is_a_model_or_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"

    @few(cost=2)
    @given(json_files(PUBLISHED[name]))
    def run(content: bytes) -> None:
        is_read(path, content)

    run()
    assert is_read(path, json.dumps(PUBLISHED[name]).encode())


TEXTS = {"escape": "\x1b[2J", "lines": "a\nb", "half": "\ud800", "long": "".join(map(chr, range(200, 2_000)))}


@pytest.mark.parametrize("name", ["model_type", "torch_dtype", "hybrid_override_pattern"])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_texts_of_a_config_are_shown_short_and_plain(name: str, text: str, tmp_path: Path) -> None:
    assert not is_read(tmp_path / "config.json", json.dumps(PUBLISHED["nemotron_h_8b"] | {name: text}).encode())
