"""Reward models: where the score is read, what a saved folder means to transformers, heads and their scale."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification

from spaniel.errors import BadInput
from spaniel.models.heads import new_value_model
from spaniel.models.hf import TinyLlama, new_llama, save_model
from spaniel.models.reward import (
    RewardModel,
    combine,
    is_reward_model,
    load_reward_model,
    new_reward_model,
    save_reward_model,
)
from spaniel.workers.scoring import scores

EOS, PAD = 0, 1
SHAPE = TinyLlama(hidden_size=16, intermediate_size=32, layers=2, heads=2, kv_heads=1, context=64)
LANGUAGE = new_llama(SHAPE, vocab_size=23, eos_id=EOS, pad_id=PAD, seed=3).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lm")
    save_model(LANGUAGE, path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> RewardModel:
    return new_reward_model(folder, heads=1, seed=1)


def by_hand(model: RewardModel, ids: list[int]) -> list[float]:
    """w . h(last) of one sequence, alone, without padding, by the language model's own network."""
    states = model.network.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
    return (model.head.weight.detach().double() @ states.detach().double()).tolist()


@settings(max_examples=30)
@given(rows=st.lists(st.lists(st.integers(0, 22), min_size=1, max_size=9), min_size=1, max_size=6),
       budget=st.sampled_from([1, 12, 1000]))  # fmt: skip
def test_the_score_is_read_at_the_last_real_token(model: RewardModel, rows: list[list[int]], budget: int) -> None:
    """Mixed lengths, eos (0) and pad (1) inside the text, eos at the end and not: the same alone and in a batch."""
    found = scores(model, rows, budget)
    for row, own in zip(rows, found.tolist(), strict=True):
        assert own == pytest.approx(by_hand(model, row), abs=1e-5)
        assert scores(model, [row], 1000)[0].tolist() == pytest.approx(own, abs=1e-5)


@pytest.mark.parametrize("pad", [EOS, PAD, 7])
def test_padding_is_any_token_at_all(model: RewardModel, pad: int) -> None:
    tokens = torch.full((2, 6), pad)
    tokens[0, :3] = torch.tensor([5, EOS, 6])
    tokens[1, :5] = torch.tensor([5, 4, EOS, EOS, EOS])
    found = model(tokens, torch.tensor([3, 5]))
    assert found[0].tolist() == pytest.approx(by_hand(model, [5, 0, 6]), abs=1e-5)
    assert found[1].tolist() == pytest.approx(by_hand(model, [5, 4, 0, 0, 0]), abs=1e-5)


def test_a_saved_model_is_one_that_transformers_reads(model: RewardModel, tmp_path: Path) -> None:
    save_reward_model(model, tmp_path, pad_id=PAD)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    tokens = torch.tensor([[5, 6, 7, EOS, PAD, PAD], [5, EOS, 7, 8, 9, EOS]])
    ours = model(tokens, torch.tensor([4, 6]))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    assert torch.allclose(theirs(input_ids=tokens, attention_mask=mask).logits, ours, atol=1e-5)
    again = load_reward_model(tmp_path)
    assert torch.equal(again(tokens, torch.tensor([4, 6])), ours)
    assert is_reward_model(tmp_path)


def test_without_a_padding_of_its_own_transformers_reads_one_text_at_a_time(model: RewardModel, tmp_path: Path) -> None:
    save_reward_model(model, tmp_path, pad_id=None)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    ids = [5, EOS, 6, EOS, EOS]
    assert theirs(input_ids=torch.tensor([ids])).logits[0].tolist() == pytest.approx(by_hand(model, ids), abs=1e-5)
    with pytest.raises(ValueError, match="pad"):
        theirs(input_ids=torch.tensor([ids, ids]))


def test_a_language_model_is_refused(folder: Path) -> None:
    assert not is_reward_model(folder)
    with pytest.raises(BadInput, match=r"no weights for score\.weight; expected a trained reward model"):
        load_reward_model(folder)


def test_offset_and_scale_are_stored_with_the_model(folder: Path, tmp_path: Path) -> None:
    model = new_reward_model(folder, heads=2, seed=1, combine="min")
    raw = torch.tensor([[1.0, 5.0], [3.0, 5.0], [5.0, 8.0]])
    model.normalise_on(raw, scale=True)
    expected = torch.stack([(raw[:, i] - raw[:, i].mean()) / raw[:, i].std() for i in range(2)], dim=1)
    assert torch.allclose(model.normalised(raw), expected, atol=1e-6)
    save_reward_model(model, tmp_path, pad_id=PAD)
    again = load_reward_model(tmp_path)
    assert torch.allclose(again.normalised(raw), expected, atol=1e-6)
    assert torch.allclose(again.combined(raw), expected.min(dim=1).values, atol=1e-6)
    model.normalise_on(torch.full((3, 2), 4.0), scale=True)  # nothing varies: a scale of 1, not 0
    assert model.normalised(torch.full((1, 2), 4.0)).tolist() == [[0.0, 0.0]]


def test_ways_to_combine_an_ensemble() -> None:
    members = torch.tensor([[1.0, 3.0], [2.0, 2.0]])
    assert combine(members, "mean").tolist() == [2.0, 2.0]
    assert combine(members, "min").tolist() == [1.0, 2.0]
    assert combine(members, "mean_minus_std", 0.5).tolist() == pytest.approx([2 - 0.5 * 2**0.5, 2.0])
    assert combine(members[:, :1], "mean_minus_std").tolist() == [1.0, 2.0]


def test_heads_start_apart_and_layers_can_be_left_out(folder: Path) -> None:
    model = new_reward_model(folder, heads=3, seed=1, layers=1)
    assert model.network.config.num_hidden_layers == 1
    weight = model.head.weight.detach()
    assert weight.shape == (3, 16)
    assert not torch.allclose(weight[0], weight[1])
    assert torch.equal(weight, new_reward_model(folder, heads=3, seed=1, layers=1).head.weight)
    with pytest.raises(BadInput, match="layers"):
        new_reward_model(folder, heads=1, seed=1, layers=3)


def test_a_critic_made_from_a_reward_model_starts_with_its_scores(folder: Path, tmp_path: Path) -> None:
    model = new_reward_model(folder, heads=2, seed=1)
    model.normalise_on(torch.randn(9, 2), scale=True)
    save_reward_model(model, tmp_path, pad_id=PAD)
    critic = new_value_model(tmp_path)
    tokens = torch.tensor([[5, 6, 7, 8, PAD]])  # a value stands where the next token would: after the last one
    expected = model.normalised(model(tokens, torch.tensor([4]))).mean(dim=1)
    assert torch.allclose(critic(tokens)[0, 4], expected[0], atol=1e-5)
