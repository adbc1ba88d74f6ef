"""Models in the local cache of Hugging Face."""

import json
from pathlib import Path

import pytest

from kvsim.errors import UsageError
from kvsim.hub import cache_folder, find_model, not_cached
from kvsim.model.huggingface import HuggingFaceModel
from kvsim.trace.tokenizer import Tokenizer, model_files
from tests.trace.models import make_model

COMMIT = "9c925d64d72725edaf899c6cb9c377fd0709d9c5"
CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 400, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """The folder of a model in a cache."""
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "home" / "hub" / "models--Qwen--Qwen3-8B"
    snapshot = folder / "snapshots" / COMMIT
    make_model(snapshot)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    return snapshot


def test_a_name_is_the_snapshot_of_its_main_branch(cached):
    assert find_model("Qwen/Qwen3-8B") == cached
    assert not_cached("Qwen/Qwen3-8B") == ""
    tokenizer = Tokenizer("Qwen/Qwen3-8B")
    tokenizer.encode_all(["It rains"])
    assert tokenizer.decode(tokenizer.encode("It rains")) == "It rains"
    assert model_files("Qwen/Qwen3-8B") == model_files(str(cached))


def test_a_model_is_read_by_its_name(cached):
    model = HuggingFaceModel(path="Qwen/Qwen3-8B")
    assert model.name == "Qwen3-8B"
    assert model.spec() == HuggingFaceModel(path=str(cached)).spec()


def test_a_path_comes_first(cached, tmp_path):
    (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    assert find_model("Qwen/Qwen3-8B") == Path("Qwen/Qwen3-8B")


@pytest.mark.parametrize("name", ["Qwen/Qwen3-32B", "../home", "a/b/c", "/Qwen/Qwen3-8B", "Qwen/.."])
def test_what_is_not_there_stays_as_it_is(cached, name):
    assert find_model(name) == Path(name)


@pytest.mark.parametrize("commit", ["../../..", "", "gone"])
def test_a_damaged_cache_has_no_model(cached, commit):
    (cached.parent.parent / "refs" / "main").write_text(commit)
    assert find_model("Qwen/Qwen3-8B") == Path("Qwen/Qwen3-8B")


def test_a_name_that_is_not_cached_is_told(cached, tmp_path):
    hub = tmp_path / "home" / "hub"
    expected = f"nor is the model in the Hugging Face cache {hub} \\(hf download Qwen/Qwen3-32B stores it there"
    with pytest.raises(UsageError, match=f"^trace.tokenizer: Qwen/Qwen3-32B/tokenizer.json does not exist; {expected}"):
        Tokenizer("Qwen/Qwen3-32B")
    with pytest.raises(UsageError, match=f"^model.path: Qwen/Qwen3-32B: No such file or directory; {expected}"):
        HuggingFaceModel(path="Qwen/Qwen3-32B").spec()


def test_the_environment_names_the_cache(monkeypatch):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_folder() == Path("~/.cache/huggingface/hub").expanduser()
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/huggingface/hub")
    monkeypatch.setenv("HF_HOME", "/h")
    assert cache_folder() == Path("/h/hub")
    monkeypatch.setenv("HF_HUB_CACHE", "/c")
    assert cache_folder() == Path("/c")
