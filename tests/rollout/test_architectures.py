"""The sampler's cache on other architectures: after several turns it says what a fresh forward pass says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from spaniel.errors import BadInput
from spaniel.rollout.sampler import Request, SamplingParams
from spaniel.rollout.torch_sampler import TorchSampler
from tests.rollout.test_torch_sampler import recomputed

COMMON: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 1, "eos_token_id": 0,
    "bos_token_id": None,
}  # fmt: skip
WINDOW = {"sliding_window": 8}
CONFIGS: dict[str, Any] = {
    "llama": lambda: tf.LlamaConfig(**COMMON),
    "qwen2": lambda: tf.Qwen2Config(**COMMON),
    "qwen3": lambda: tf.Qwen3Config(**COMMON, head_dim=8),
    "mistral with a sliding window": lambda: tf.MistralConfig(**COMMON, **WINDOW),
    "gemma2 with both kinds of layers": lambda: tf.Gemma2Config(**COMMON, **WINDOW, head_dim=8),
    "gemma3 with both kinds of layers": lambda: tf.Gemma3TextConfig(
        **COMMON, **WINDOW, head_dim=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt2": lambda: tf.GPT2Config(
        vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=128, eos_token_id=0, bos_token_id=0, pad_token_id=1
    ),
    "gpt-neox": lambda: tf.GPTNeoXConfig(**{k: v for k, v in COMMON.items() if k != "num_key_value_heads"}),
    "phi3": lambda: tf.Phi3Config(**COMMON),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_turn_by_turn_equals_a_forward_pass_over_everything(name: str) -> None:
    torch.manual_seed(5)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[name]()).float().eval()
    own = TorchSampler(model, str, frozenset([0]))
    asked = [Request((0, i), tuple(range(2, 5 + 2 * i)), (0, i)) for i in range(3)]
    for turn in range(3):  # beyond the sliding window of 8
        spans = own.sample(asked, SamplingParams(5))
        for request, span in zip(asked, spans, strict=True):
            expected = recomputed(model, request.tokens, span.tokens, 1.0)
            assert span.logprobs == pytest.approx(expected, abs=2e-5)
        asked = [
            Request(r.key, r.tokens + s.tokens + tuple(range(10, 13 + i)), (turn + 1, i))
            for i, (r, s) in enumerate(zip(asked, spans, strict=True))
        ]


def test_layers_that_are_no_attention_are_refused_by_name() -> None:
    config = tf.LlamaConfig(**COMMON)
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(BadInput, match="linear_attention"):
        TorchSampler(model, str, frozenset([0])).sample([Request((0,), (2, 3), (1,))], SamplingParams(2))
