"""Hugging Face networks: made from a config, loaded from and saved to folders, and a cache with one slot a position."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.utils import logging

from spaniel.errors import BadInput

logging.disable_progress_bar()  # a bar for each shard of a small model drowns the run's own progress

_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class TinyLlama:
    """Shape of a small Llama trained from scratch (tied embeddings, rotary positions, grouped heads)."""

    hidden_size: int = 128
    intermediate_size: int = 384
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4
    context: int = 512
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads or self.heads % self.kv_heads:
            raise BadInput(
                f"tiny model: hidden_size {self.hidden_size} must be a multiple of heads {self.heads}, "
                f"and heads a multiple of kv_heads {self.kv_heads}"
            )


def new_llama(shape: TinyLlama, *, vocab_size: int, eos_id: int, pad_id: int, seed: int) -> nn.Module:
    """A freshly initialised Llama; the same seed gives the same weights."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float()


def load_causal_lm(folder: str | Path) -> nn.Module:
    """The causal language model in a Hugging Face `folder`, in float32, in evaluation mode."""
    return _load(AutoModelForCausalLM, folder)


def load_backbone(folder: str | Path) -> nn.Module:
    """The same network without its language-model head (for value and reward heads)."""
    return _load(AutoModel, folder)


def load_classifier(
    folder: str | Path, *, heads: int | None = None, layers: int | None = None
) -> tuple[nn.Module, list[str]]:
    """A sequence-classification network with one linear unit a head (`heads` None: those that the folder has), and
    the names of its weights that the folder does not hold. `layers` keeps only the first so many layers."""
    path = _checked(folder)
    changes: dict[str, Any] = {"num_labels": heads} if heads else {}
    if layers is not None:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        if not 1 <= layers <= config.num_hidden_layers:
            raise BadInput(f"model.layers: {layers}; expected 1 to {config.num_hidden_layers}, the layers of {path}")
        changes["num_hidden_layers"] = layers
        if getattr(config, "layer_types", None):
            changes["layer_types"] = config.layer_types[:layers]
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # a new head and layers left out are what was asked for; a missing one is checked
    try:
        network, info = _loaded(AutoModelForSequenceClassification, path, output_loading_info=True, **changes)
    finally:
        logging.set_verbosity(level)
    if not isinstance(getattr(network, "score", None), nn.Linear):
        raise BadInput(f"model folder {path}: {type(network).__name__} has no linear unit `score` on its last token; "
                       "expected a decoder such as Llama, Qwen, Gemma or Mistral")  # fmt: skip
    return network.eval(), sorted(info["missing_keys"])


def _load(loader: Any, folder: str | Path) -> nn.Module:
    return _loaded(loader, _checked(folder)).eval()


def _checked(folder: str | Path) -> Path:
    path = Path(folder)
    if not path.is_dir():
        raise BadInput(f"model folder {path}: not found; expected a Hugging Face folder with config.json and weights")
    if not (path / "config.json").is_file():
        raise BadInput(f"model folder {path}: holds no config.json; expected a Hugging Face folder")
    return path


def _loaded(loader: Any, path: Path, **more: Any) -> Any:
    try:
        found = loader.from_pretrained(
            path, dtype=torch.float32, local_files_only=True, trust_remote_code=False, **more
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise BadInput(f"model folder {path}: cannot be loaded: {error}") from error
    _own_memory(found[0] if isinstance(found, tuple) else found)
    return found


@torch.no_grad()
def _own_memory(model: nn.Module) -> None:
    """Copy the weights out of the mapped file, where they lie at any address.

    Products with them would differ in the last bit from run to run, and a resumed run from an uninterrupted one.
    """
    for weight in model.parameters():
        weight.data = weight.data.clone()


def save_model(model: nn.Module, folder: str | Path) -> None:
    """Write config and weights (safetensors) so that `from_pretrained(folder)` gives the same logits."""
    model.save_pretrained(str(folder), safe_serialization=True)  # type: ignore[operator]


def config_of(model: nn.Module) -> Any:
    """The model's Hugging Face config."""
    return model.config


def load_config(folder: str | Path) -> Any:
    """The config of a Hugging Face `folder`, without its weights."""
    return AutoConfig.from_pretrained(_checked(folder), local_files_only=True, trust_remote_code=False)


def vocabulary(model: Any) -> int:
    """The number of ids that a model, or the model of a config, can read."""
    return int(getattr(model, "config", model).vocab_size)


def context_length(model: nn.Module) -> int | None:
    """The longest sequence that the model was made for, where its config says so."""
    return getattr(config_of(model), "max_position_embeddings", None)


def logits_at(model: nn.Module, tokens: Tensor, keep: Tensor | None = None) -> Tensor:
    """Next-token logits f32[B, T or len(keep), V] of right-padded `tokens`.

    No attention mask is needed: attention is causal and padding is on the right, so a real token never sees
    padding. `keep` (i64[n]) limits the output to those positions, which saves the memory of B*T*V.
    """
    if keep is None:
        return model(input_ids=tokens, use_cache=False).logits.float()
    return model(input_ids=tokens, use_cache=False, logits_to_keep=keep).logits.float()


def hidden_states(backbone: nn.Module, tokens: Tensor) -> Tensor:
    """Last hidden states [B, T, H] of right-padded `tokens`."""
    return backbone(input_ids=tokens, use_cache=False).last_hidden_state


class _SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [B, heads, slots, dim], where slot = position in the row's sequence.

    Rows of different lengths need no padding on the left and leave no holes: what a padded query writes lies
    behind the row's end, is never attended to (mask: slot <= position), and is overwritten by the next token.
    """

    is_sliding = False

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self.owner = owner
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        positions, width = self.owner.positions, self.owner.width
        self.keys = _grown(self.keys, key_states, width)
        self.values = _grown(self.values, value_states, width)
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        self.keys[rows, :, positions] = key_states.transpose(1, 2)
        self.values[rows, :, positions] = value_states.transpose(1, 2)
        self.is_initialized = True
        return self.keys[:, :, :width], self.values[:, :, :width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.width, 0

    def get_seq_length(self) -> int:
        return self.owner.width

    def get_max_length(self) -> int:
        return -1


def _grown(buffer: Tensor | None, new: Tensor, width: int) -> Tensor:
    """`buffer` with room for `width` slots (grown in steps of 64: copying at every token would cost more)."""
    have = 0 if buffer is None else buffer.shape[2]
    if buffer is not None and have >= width:
        return buffer
    batch, heads, _, dim = new.shape
    grown = new.new_zeros(batch, heads, -(-width // 64) * 64, dim)
    if buffer is not None:
        grown[:, :, :have] = buffer
    return grown


class SlotCache(Cache):
    """A key-value cache whose slots are positions; for ragged batches that grow turn by turn."""

    def __init__(self, model: nn.Module) -> None:
        config = config_of(model)
        kinds = set(getattr(config, "layer_types", None) or {"full_attention"})
        if kinds - _ATTENTION_LAYERS:
            raise BadInput(
                f"sampler torch: the model has layers {sorted(kinds - _ATTENTION_LAYERS)}; "
                f"supported are {sorted(_ATTENTION_LAYERS)}"
            )
        super().__init__(layers=[_SlotLayer(self) for _ in range(config.num_hidden_layers)])
        self.positions = torch.zeros(0, 0, dtype=torch.long)
        self.width = 0

    def select(self, rows: Tensor) -> None:
        """Keep only `rows` (repeats allowed), in that order."""
        for layer in self.layers:
            assert isinstance(layer, _SlotLayer)
            assert layer.keys is not None
            assert layer.values is not None
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]


def decode(model: nn.Module, cache: SlotCache, tokens: Tensor, positions: Tensor, last: Tensor) -> Tensor:
    """Feed `tokens` i64[B, q] at `positions` i64[B, q]; logits f32[B, V] after column `last` i64[B] of each row."""
    cache.positions, cache.width = positions, int(positions.max()) + 1
    slots = torch.arange(cache.width, device=tokens.device)
    mask = (slots <= positions[:, :, None])[:, None]
    arguments = {
        "input_ids": tokens,
        "position_ids": positions,
        "attention_mask": _by_layer_type(model, mask, slots, positions),
        _cache_argument(model): cache,
        "use_cache": True,
    }
    if tokens.shape[1] > 1:
        keep, column = torch.unique(last, return_inverse=True)
        arguments["logits_to_keep"] = keep
        return model(**arguments).logits[torch.arange(len(tokens)), column].float()
    return model(**arguments).logits[:, -1].float()


def _by_layer_type(model: nn.Module, mask: Tensor, slots: Tensor, positions: Tensor) -> Any:
    """One mask, or one a kind of layer where the model also has layers with a sliding window."""
    config = config_of(model)
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    whole = _as_attention_reads_it(model, mask)
    if not window or (kinds and "sliding_attention" not in kinds):
        return whole
    near = _as_attention_reads_it(model, mask & (slots > positions[:, :, None] - window)[:, None])
    return {"full_attention": whole, "sliding_attention": near} if kinds else near


def _as_attention_reads_it(model: nn.Module, mask: Tensor) -> Tensor:
    """Eager attention (models with capped logits) adds the mask to the scores; torch's own takes it as it is."""
    if getattr(config_of(model), "_attn_implementation", "sdpa") != "eager":
        return mask
    dtype = next(model.parameters()).dtype
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def _cache_argument(model: nn.Module) -> str:
    """transformers renamed `past_key_values` to `cache`; both stand in the supported range."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
