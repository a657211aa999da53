"""Networks: the one shift, heads, saving and loading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spaniel.errors import BadInput
from spaniel.models.heads import load_value_model, new_value_model, save_value_model
from spaniel.models.hf import TinyLlama, context_length, load_backbone, load_causal_lm, new_llama, save_model
from spaniel.models.logprobs import policy_outputs

SHAPE = TinyLlama(hidden_size=16, intermediate_size=32, layers=2, heads=2, kv_heads=1, context=64)
MODEL = new_llama(SHAPE, vocab_size=23, eos_id=0, pad_id=1, seed=3).eval()


def by_hand(tokens: list[int], temperature: float) -> tuple[list[float], list[float]]:
    """float64 log-probabilities and entropies, one row, no batch, no padding."""
    logits = MODEL(input_ids=torch.tensor([tokens])).logits[0].detach().double() / temperature
    logp = logits - logits.exp().sum(-1, keepdim=True).log()
    entropy = -(logp.exp() * logp).sum(-1)
    return [0.0] + [float(logp[t - 1, tokens[t]]) for t in range(1, len(tokens))], [0.0, *entropy[:-1].tolist()]


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.integers(0, 22), min_size=2, max_size=9), min_size=1, max_size=4),
    st.sampled_from([0.5, 1.0, 1.7]),
    st.randoms(use_true_random=False),
)
def test_batched_logprobs_and_entropies_are_those_of_single_rows(
    rows: list, temperature: float, random: object
) -> None:
    width = max(map(len, rows)) + 1
    tokens = torch.full((len(rows), width), 5)
    actions = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
        for t in range(1, len(row)):
            actions[i, t] = random.random() < 0.6  # type: ignore[attr-defined]
    logp, entropy = (x.detach() for x in policy_outputs(MODEL, tokens, actions, temperature))
    for i, row in enumerate(rows):
        expected, spread = by_hand(row, temperature)
        for t in range(width):
            on = bool(actions[i, t])
            assert float(logp[i, t]) == pytest.approx(expected[t] if on else 0.0, abs=1e-5)
            assert float(entropy[i, t]) == pytest.approx(spread[t] if on else 0.0, abs=1e-5)


def test_temperature_divides_logits_not_logprobs() -> None:
    logits = torch.tensor([2.0, 0.0])
    assert float(torch.log_softmax(logits / 0.5, -1)[0]) == pytest.approx(-0.01815, abs=1e-5)
    logp, _ = policy_outputs(MODEL, torch.tensor([[3, 4]]), torch.tensor([[False, True]]), 0.5)
    plain = MODEL(input_ids=torch.tensor([[3]])).logits[0, -1]
    assert float(logp[0, 1]) == pytest.approx(float(torch.log_softmax(plain / 0.5, -1)[4]), abs=1e-6)


def test_what_stands_in_padding_changes_nothing() -> None:
    tokens = torch.tensor([[3, 4, 5, 6, 0, 0], [7, 8, 9, 3, 4, 5]])
    actions = torch.tensor([[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]], dtype=torch.bool)
    other = tokens.clone()
    other[0, 4:] = 22
    assert torch.equal(policy_outputs(MODEL, tokens, actions)[0], policy_outputs(MODEL, other, actions)[0])


def test_no_action_gives_zero_with_a_zero_gradient_and_position_zero_is_refused() -> None:
    logp, _ = policy_outputs(MODEL, torch.tensor([[3, 4]]), torch.zeros(1, 2, dtype=torch.bool))
    assert logp.tolist() == [[0.0, 0.0]]
    logp.sum().backward()
    with pytest.raises(ValueError, match="position 0"):
        policy_outputs(MODEL, torch.tensor([[3, 4]]), torch.tensor([[True, False]]))


def test_models_reload_with_equal_logits_tied_weights_included(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save_model(MODEL, tmp_path)
    tokens = torch.tensor([[3, 4, 5]])
    expected = MODEL(input_ids=tokens).logits
    assert torch.equal(load_causal_lm(tmp_path)(input_ids=tokens).logits, expected)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(input_ids=tokens).logits, expected)
    assert context_length(loaded) == 64


def test_same_seed_same_weights_and_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    again = new_llama(SHAPE, vocab_size=23, eos_id=0, pad_id=1, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), MODEL.parameters(), strict=True))


def test_values_are_those_of_the_state_before_the_token(tmp_path: Path) -> None:
    save_model(MODEL, tmp_path)
    critic = new_value_model(tmp_path)
    tokens = torch.tensor([[3, 4, 5, 6]])
    assert critic(tokens).tolist() == [[0.0] * 4]  # a new head says 0
    torch.nn.init.normal_(critic.head.weight)
    hidden = load_backbone(tmp_path)(input_ids=tokens).last_hidden_state
    expected = (hidden @ critic.head.weight.T)[0, :, 0] + critic.head.bias
    values = critic(tokens)[0]
    assert values[0] == 0
    assert torch.allclose(values[1:], expected[:-1], atol=1e-5)
    changed = critic(torch.tensor([[3, 4, 5, 9]]))[0]
    assert torch.equal(values, changed)  # V of a token's state does not see the token
    save_value_model(critic, tmp_path / "critic")
    assert torch.equal(load_value_model(tmp_path / "critic")(tokens)[0], values)


def test_bad_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nowhere: not found"):
        load_causal_lm(tmp_path / "nowhere")
    with pytest.raises(BadInput, match=r"no config\.json"):
        load_causal_lm(tmp_path)
    save_model(MODEL, tmp_path)
    with pytest.raises(BadInput, match="no value_head"):
        load_value_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(BadInput, match="cannot be loaded"):
        load_causal_lm(tmp_path)
    with pytest.raises(BadInput, match="multiple of heads"):
        TinyLlama(hidden_size=10, heads=4)
