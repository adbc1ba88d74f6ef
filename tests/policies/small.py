"""Eviction policies on caches small enough to follow by hand."""

from importlib.resources import files
from typing import Any

import hydra.utils
from omegaconf import OmegaConf

from kvsim.policies.eviction.base import BypassEviction
from tests.core.small import SmallCache, small_cache

FOLDER = files("kvsim.conf") / "eviction"


def policy_of(name: str) -> Any:
    """The policy of a file of ``conf/eviction``, with its defaults."""
    settings = OmegaConf.to_container(OmegaConf.create((FOLDER / name).read_text()))
    assert isinstance(settings, dict)
    return hydra.utils.get_class(settings.pop("_target_"))(**settings)


POLICIES = [
    name
    for name in sorted(path.name for path in FOLDER.iterdir() if path.name.endswith(".yaml"))
    if not isinstance(policy_of(name), BypassEviction)
]
"""Those that evict from the core's tree. Bounds are tested by themselves."""


def filled(policy: Any, *words: str, gpu: int = 12) -> SmallCache:
    cache = small_cache(gpu=gpu, eviction=[lambda: policy])
    for word in words:
        cache.use(word)
    return cache
