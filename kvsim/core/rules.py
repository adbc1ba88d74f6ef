"""Rules in which real engines differ from each other. An engine that differs more deeply has a subclass with its own cache."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from kvsim.core.fan_out import TOGETHER, FanOut
from kvsim.core.questions import Checkpoints
from kvsim.core.request import Request
from kvsim.core.serving import ServedCache, Server
from kvsim.core.tier import Edge, Tier
from kvsim.errors import IdleSetting
from kvsim.hardware.tier_kinds import LEVELS
from kvsim.model.spec import ModelSpec

IN_TIME = ("simulate", "validate")
"""Commands that run engines in time; all others replay requests."""

OWN = "or set rules=default for kvsim's own rules with the same policies"
"""The end of a message about what an engine's rules do not support."""


@dataclass(frozen=True, kw_only=True)
class HybridSettings:
    """What the cache of a model with recurrent layers needs to know about states and prefills."""

    checkpoint: Checkpoints
    """Bound already."""
    state_tiers: list[Tier] | None
    """Tiers of states only, from the GPU down, whose slots hold one state each; None if states take slots of the page tiers."""
    state_pages: int
    """Slots that a state takes: 1 in tiers of states only."""
    state_bytes: int
    grid_pages: int
    """States exist only after multiples of this number of pages."""
    prefill_chunk_tokens: int
    """Prompt tokens that one step computes, for an engine's rules; 0: whole prompts."""


@dataclass(frozen=True, kw_only=True)
class WindowSettings:
    """What the cache of a model with sliding windows needs to know about its layers."""

    full_layers: int
    window_layers: int
    window_tokens: int
    chunk_tokens: int
    """Prompt tokens that one step of a replay computes; 0: whole prompts."""
    batch_tokens: int
    """The most tokens that one step of an engine in time computes."""


@dataclass(frozen=True, kw_only=True)
class CacheSetup:
    """What a cache is made of."""

    tiers: list[Tier]
    edges: list[Edge]
    page_tokens: int
    hybrid: HybridSettings | None = None
    """For a model with recurrent layers; None for any other."""
    windows: WindowSettings | None = None
    """For a model of which some layers have a sliding window; None for any other."""
    prefill_chunk_tokens: int = 0
    """Prompt tokens that one step of a replay computes, by rules with ``prefills_in_chunks``; 0: whole prompts."""
    copy_steps: int = 0
    """Steps of a replay from the beginning of a copy to its acknowledgement, by rules with ``counts_steps``."""
    prefetch: Any = None
    """The prefetch policy for rules with ``asks_prefetch``, bound already; None without a tier to read from."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """kvsim's own rules. A subclass holds those of an engine, which may cover only some commands and tiers."""

    engine: ClassVar[str] = ""
    """The engine whose rules these are; empty for kvsim's own."""

    covers_time: ClassVar[bool] = True
    """Whether the rules say what happens in time. Otherwise they are for replays, and kvsim's own apply to all other commands."""

    covered_tiers: ClassVar[Sequence[str]] = LEVELS
    """The tiers that the rules cover."""

    refuses_other_tiers: ClassVar[bool] = False
    """Whether a run by an engine's rules must have no other tiers. Otherwise, with any other tier, kvsim's own rules apply."""

    fixed_settings: ClassVar[Sequence[str]] = ()
    """Settings of kvsim's own rules that have their default value by an engine's rules."""

    settings_in_time: ClassVar[Sequence[str]] = ()
    """An engine's own settings that have an effect in time only."""

    serves_hybrid_models: ClassVar[bool] = False
    """Whether an engine's rules are for models with recurrent layers, whose prompts are then computed in chunks
    (``replay.prefill_chunk_tokens``), instead of for others."""

    serves_windows: ClassVar[bool] = False
    """Whether an engine's rules are for models of which some layers have a sliding window, instead of for others, and free what
    is behind it. Prompts are then computed in chunks. By other rules, such layers keep the KV of the whole prompt."""

    prefills_in_chunks: ClassVar[bool] = False
    """Whether a replay by an engine's rules for other models, too, computes prompts in chunks, if that is set."""

    counts_steps: ClassVar[bool] = False
    """Whether a replay by an engine's rules counts steps, so that copies can take some (``replay.copy_steps``)."""

    asks_prefetch: ClassVar[bool] = False
    """Whether the cache of an engine's rules asks the prefetch policy what to read ahead."""

    decides_checkpoints: ClassVar[bool] = False
    """Whether the engine itself decides where states are saved, so that no checkpoint policy is asked."""

    has_coarse_pages: ClassVar[bool] = False
    """Whether the CPU tier may have larger pages than the GPU (``tiers.cpu.page_tokens``)."""

    knows_slots: ClassVar[bool] = False
    """Whether an engine's cache knows the slots of every page that it copies, which real memory needs (``substrate=hardware``).
    kvsim's own cache does."""

    has_bigram_keys: ClassVar[bool] = False
    """Whether an engine's rules know keys of token pairs (``trace.bigram``). kvsim's own rules take any keys."""

    knows_images: ClassVar[bool] = False
    """Whether an engine's rules let no hit end inside an image of a trace. kvsim's own rules never do."""

    knows_resets: ClassVar[bool] = False
    """Whether an engine's rules allow a trace to reset the cache. kvsim's own rules do."""

    with_stages: ClassVar[str] = ""
    """What to set so that an engine's own schedule can have several steps in flight, as a pipeline does; empty: it never can."""

    samples: ClassVar[FanOut | None] = TOGETHER
    """How several answers to one prompt begin; None if an engine's rules do not support them."""

    knows_persistent: ClassVar[bool] = False
    """Whether an engine's rules keep persistent prompts of a trace on the GPU. kvsim's own rules do."""

    recompute_last_token: bool = True
    """The last prompt token is always computed, so a fully cached prompt that ends on a page boundary loses its last page."""

    cache_output: bool | None = False
    """The answer of a finished request is cached too: the full pages of prompt and answer, without the answer's last token,
    whose KV is never computed. True needs a trace with the tokens of its answers; None caches those of such a trace."""

    cache_chunks: bool = True
    """In time: pages can be found as soon as a prefill chunk has computed them; otherwise when the whole prompt is computed."""

    @property
    def whose(self) -> str:
        """Whose rules these are, for a line about them."""
        return self.engine

    def page_bytes(self, model: ModelSpec, page_tokens: int) -> int:
        """Return the bytes of a slot of the GPU tier: by default, those of a page of all layers."""
        return model.page_bytes(page_tokens)

    def taken_tokens(self, model: ModelSpec, tokens: float) -> float:
        """Return the tokens that the GPU tier's slots for a decoding request hold that has so many: by default, as many."""
        return tokens

    def check_model(self, model: ModelSpec) -> None:
        """Raise ValueError if the rules, which apply, do not support a model."""

    def can_cache_answers(self, command: str, tiers: Sequence[str]) -> bool:
        """Whether ``cache_output`` is supported on a command with the tiers of these names."""
        return True

    def for_command(self, command: str, tiers: Sequence[str]) -> "Rules":
        """Return the rules that apply to a command with the tiers of these names: these, or kvsim's own if these do not cover it.

        Raises ValueError for one of an engine's own settings that then has no effect.
        """
        return self if self.covers(command, tiers) else self._own(command, tiers)

    def _own(self, command: str, tiers: Sequence[str]) -> "Rules":
        """Return kvsim's own rules instead of these. Raises ValueError for one of an engine's own settings."""
        known = {field.name for field in fields(Rules)}
        for field in fields(self):
            if field.name not in known and getattr(self, field.name) != field.default:
                where = f"on kvsim {command} with tiers {', '.join(tiers)}, which uses kvsim's own rules"
                raise IdleSetting(field.name, where)
        return Rules(**{name: getattr(self, name) for name in known})

    def covers(self, command: str, tiers: Sequence[str]) -> bool:
        """Whether the rules apply to a command with these tiers, or refuse it, instead of giving way to kvsim's own."""
        in_time = self.covers_time or command not in IN_TIME
        return in_time and (self.refuses_other_tiers or set(tiers) <= set(self.covered_tiers))

    def check(self, command: str, tiers: Sequence[str]) -> None:
        """Raise ValueError if the rules do not support ``command``, one of the tiers with these names, or a setting."""
        whose = f"{self.engine}'s rules{' for hybrid models' if self.serves_hybrid_models else ''}"
        for name in tiers:
            if name not in self.covered_tiers:
                raise ValueError(f"{whose} have no {name} tier: set tiers.{name}.capacity=0, {OWN}")
        for field in fields(Rules):
            if field.name in self.fixed_settings and (value := getattr(self, field.name)) != field.default:
                setting, default = f"{field.name}={value}".lower(), str(field.default).lower()
                raise ValueError(f"{setting} is not supported by {whose}: set it to {default}, {OWN}")

    def has_stages(self, tiers: Sequence[str]) -> bool:
        """Whether several steps may be in flight, as in a pipeline, in time and with the tiers of these names."""
        return not self.engine

    def check_schedule(self, scheduling: Any, page_tokens: int, max_batch_tokens: int) -> None:
        """Raise ValueError if the rules, which apply to a simulation, do not support its scheduling policy or its steps."""

    def check_requests(
        self, requests: Sequence[Request], pages: Sequence[int], capacities: Mapping[str, int | None], page_tokens: int
    ) -> None:
        """Raise ValueError if an engine's rules cannot serve these requests, which take ``pages`` pages each while they run.

        ``capacities`` are those of the tiers, by name and in pages; None is unlimited.
        """

    def server(self, setup: CacheSetup) -> Server | None:
        """Return an empty cache that serves a replay's requests by these rules; None for kvsim's own cache.

        Raises ValueError if the rules do not support the setup.
        """
        return None

    def observed(self, setup: CacheSetup) -> Server | None:
        """Return the same for requests as a real engine admitted them; the server of replays if that has all moments."""
        return self.server(setup)

    def cache(self, setup: CacheSetup) -> ServedCache | None:
        """Return an empty cache from which an engine in time serves requests by these rules; None for kvsim's own cache.

        Raises ValueError if the rules do not support the setup.
        """
        return None

    def scheduler(self) -> Callable[[Any], Any] | None:
        """Return what makes an engine's schedule by these rules (``kvsim/engine/schedule.py``) of the engine's parts; None for
        kvsim's own schedule."""
        return None
