"""Every trace has a YAML whose settings are those of its class, all of them, at their defaults."""

from pathlib import Path

import pytest
from hydra.utils import get_class
from omegaconf import OmegaConf

import kvsim.conf
from kvsim.trace.base import TraceSource

NEEDED = {"path": "trace.jsonl", "prompts": ["a b"]}
"""Values of the settings that have no default."""
FOLDER = Path(next(iter(kvsim.conf.__path__))) / "trace"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_the_yaml_shows_every_setting_at_its_default(name):
    config = OmegaConf.create({"seed": 0, "trace": OmegaConf.load(FOLDER / f"{name}.yaml")})
    needed = {key: NEEDED[key] for key in config.trace if OmegaConf.is_missing(config.trace, key)}
    config.trace = OmegaConf.merge(config.trace, needed)
    settings = OmegaConf.to_container(config.trace, resolve=True)
    cls = get_class(settings.pop("_target_"))
    assert issubclass(cls, TraceSource)
    assert settings == OmegaConf.to_container(OmegaConf.structured(cls(**needed)))


def test_there_is_a_yaml_for_every_reader_and_generator():
    assert {path.stem for path in FOLDER.glob("*.yaml")} >= {"bailian", "mooncake", "weka", "tokens", "synthetic"}
