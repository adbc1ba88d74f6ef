"""Reads a model from the ``config.json`` that Hugging Face publishes with it (``model=hf model.path=DIR``)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvsim.errors import UsageError
from kvsim.hub import find_model, not_cached
from kvsim.model.families import FAMILIES, Fields, dtype_bytes
from kvsim.model.spec import ModelSource, ModelSpec
from kvsim.numbers import Real, Whole, check_settings, refusal, shown

BITS = {"fp8": 8.0, "mxfp4": 4.25, "awq": None, "gptq": None, "bitsandbytes": None, "compressed-tensors": None}
"""Bits per weight of a ``quant_method``, scales included where each group of weights has one; None: the file says."""
OF_EXPERTS = ("mxfp4",)
"""Methods that quantize only the routed experts."""

PATTERNS = {"gemma2": 2, "gemma3_text": 6}
"""Where the file does not say it: one layer in this many has full attention, the others a window."""
MOST_LAYERS = 10_000
UNUSABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""What fields of other types and sizes than those of a model lead to."""


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel(ModelSource):
    """A model by its ``config.json``. Raises ValueError for a file that cannot be read."""

    path: str
    """The file ``config.json``, its folder, or ORG/NAME of a model in the local cache of Hugging Face."""
    kv_dtype_bytes: int | None = None
    """None: as ``torch_dtype`` says."""
    weight_dtype_bytes: float | None = None
    """None: as ``quantization_config`` and ``torch_dtype`` say."""

    def __post_init__(self) -> None:
        check_settings(self, Whole(1), "kv_dtype_bytes", or_null=True, hint="null takes it from the file")
        check_settings(self, Real(above=0), "weight_dtype_bytes", or_null=True, hint="null takes it from the file")

    @property
    def file(self) -> Path:
        """The file itself."""
        path = find_model(self.path)
        return path / "config.json" if path.is_dir() else path

    @property
    def name(self) -> str:
        """The name of the model's folder, or in the cache; that of a file with another name, without its ending."""
        if find_model(self.path) != Path(self.path).expanduser():
            return self.path.rpartition("/")[2]
        return self.file.stem if self.file.name != "config.json" else self.file.absolute().parent.name

    def spec(self) -> ModelSpec:
        """Return the model. Raises UsageError that names what is missing or not known."""
        return self._read()[0]

    def note(self) -> str:
        """Say what was understood, and what is not exact."""
        spec, remarks = self._read()
        return "; ".join([f"{self.name}: {summary(spec)}", *remarks])

    def _read(self) -> tuple[ModelSpec, list[str]]:
        whole = Fields(self._content(), str(self.file))
        try:
            return self._understood(whole)
        except UNUSABLE as error:
            raise whole.error(f"{whole.kind}: a field has a value that cannot be: {shown(str(error))}") from error

    def _understood(self, whole: Fields) -> tuple[ModelSpec, list[str]]:
        remarks = []
        fields = whole
        if isinstance(text := whole.values.get("text_config"), Mapping):
            fields = Fields({**_inherited(whole.values), **text}, whole.path)
            remarks.append("only its text model is counted")
        if fields.kind not in FAMILIES:
            problem = "is missing" if fields.get("model_type") is None else f"{fields.kind} is not known"
            raise fields.error(f"model_type {problem}; known are for example {', '.join(list(FAMILIES)[:6])}")
        if fields.get("num_kv_shared_layers"):
            raise fields.error("layers that share their KV (num_kv_shared_layers) are not known")
        if not Whole(1, MOST_LAYERS).holds(fields.need("num_hidden_layers")):
            raise fields.error(refusal("num_hidden_layers", Whole(1, MOST_LAYERS), fields.values["num_hidden_layers"]))
        settings = FAMILIES[fields.kind](fields) | window(fields)
        stored = dtype_bytes(fields, fields.get("torch_dtype", fields.get("dtype", "bfloat16")))
        try:
            spec = ModelSpec(**settings, kv_dtype_bytes=self.kv_dtype_bytes or stored, weight_dtype_bytes=stored)
        except (ValueError, TypeError) as error:
            raise fields.error(f"{fields.kind}: {error}") from error
        n_bytes = self.weight_dtype_bytes
        if n_bytes is None:
            n_bytes = _weight_bytes(fields, spec, stored)
            if n_bytes not in (stored, 1.0):
                remarks.append(f"{n_bytes:.3g} bytes per weight on average")
        return replace(spec, weight_dtype_bytes=n_bytes), remarks

    def _content(self) -> dict[str, Any]:
        if self.file.exists() and not self.file.is_file():
            raise UsageError(f"model.path: {self.file} is not a file: name the folder with the model's config.json")
        try:
            content = json.loads(self.file.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        except OSError as error:
            raise UsageError(
                f"model.path: {self.file}: {error.strerror}{not_cached(self.path)}: name the folder with the model's config.json"
            ) from error
        except RecursionError as error:
            raise UsageError(f"model.path: {self.file} is not JSON that can be read: nested too deeply") from error
        except ValueError as error:
            raise UsageError(f"model.path: {self.file} is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise UsageError(f"model.path: {self.file} is not a config.json: it holds no fields")
        return content


def summary(spec: ModelSpec) -> str:
    """Describe a model in a few words: attention, KV, weights, states."""
    if spec.is_latent:
        attention = f"latent attention of {spec.kv_latent_dim} + {spec.rope_dim}"
    else:
        attention = f"{spec.kv_heads} KV heads x {spec.head_dim}"
    parts = [
        f"{spec.attention_layers} attention layers with {attention}, {spec.kv_dtype_bytes} bytes each",
        f"{spec.kv_bytes_per_token:,} bytes of KV per token",
        f"{spec.parameters / 1e9:,.2f}e9 parameters ({spec.active_parameters / 1e9:,.2f}e9 per token) in "
        f"{spec.parameters * spec.weight_dtype_bytes / 2**30:,.1f} GiB",
    ]
    if spec.routed_experts:
        parts.append(f"{spec.experts_per_token} of {spec.routed_experts} experts")
    if spec.sliding_window_layers:
        parts.append(f"{spec.sliding_window_layers} attention layers with a window of {spec.sliding_window_tokens:,} tokens")
    if spec.is_hybrid:
        parts.append(f"{spec.recurrent_layers} recurrent layers with a state of {spec.state_bytes / 2**20:,.1f} MiB")
    return ", ".join(parts)


def window(fields: Fields) -> dict[str, int]:
    """Return the settings of layers that look at a window of the prompt only; none without such layers."""
    size, layers = fields.get("sliding_window"), fields.need("num_hidden_layers")
    kinds = fields.get("layer_types", [])
    if "chunked_attention" in kinds:
        raise fields.error("chunked_attention is not known")
    if not size or fields.get("use_sliding_window") is False or size >= fields.get("max_position_embeddings", size + 1):
        return {}
    if kinds:
        local = kinds.count("sliding_attention")
    elif pattern := fields.get("sliding_window_pattern", PATTERNS.get(fields.kind, 0)):
        local = layers - layers // pattern
    else:
        local = layers - (fields.get("max_window_layers", 0) if fields.get("use_sliding_window") else 0)
    return {"sliding_window_layers": local, "sliding_window_tokens": size} if local > 0 else {}


def _inherited(whole: Mapping[str, Any]) -> dict[str, Any]:
    """What the text model's own configuration may leave to the whole."""
    return {name: whole[name] for name in ("torch_dtype", "dtype", "quantization_config", "tie_word_embeddings") if name in whole}


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _weight_bytes(fields: Fields, spec: ModelSpec, stored: int) -> float:
    """Return the mean bytes per weight. Raises UsageError for an unknown quantization."""
    quantized = fields.get("quantization_config")
    if not quantized:
        return float(stored)
    method = quantized.get("quant_method")
    if not isinstance(method, str) or method not in BITS or (bits := BITS[method] or _bits(quantized)) is None:
        raise UsageError(
            f"model.path: {fields.path}: quantization_config with quant_method {str(method)[:100]} is not known: set "
            "model.weight_dtype_bytes, for example to 0.5 for 4-bit weights"
        )
    if not Real(above=0, most=64).holds(bits):
        raise fields.error(refusal("the bits of quantization_config", Real(above=0, most=64), bits))
    if method not in OF_EXPERTS:
        return bits / 8
    experts = spec.routed_experts * 3 * spec.hidden_size * spec.expert_width * (spec.layers - spec.dense_layers)
    return (experts * bits / 8 + (spec.parameters - experts) * stored) / spec.parameters


def _bits(quantized: Mapping[str, Any]) -> float | None:
    """Return the bits per weight that the file states; None if it does not."""
    if "bits" in quantized:
        return float(quantized["bits"])
    if quantized.get("load_in_4bit") or quantized.get("load_in_8bit"):
        return 4.0 if quantized.get("load_in_4bit") else 8.0
    groups = quantized.get("config_groups")
    found = {group["weights"]["num_bits"] for group in groups.values()} if isinstance(groups, Mapping) else set()
    return float(found.pop()) if len(found) == 1 else None
