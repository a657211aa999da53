"""The lab: its labeler and data, its five parts by hand, and its loops over our names."""

from __future__ import annotations

import copy
import json
import math
import random
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

Script = Callable[[str], ModuleType]


@pytest.fixture
def labeler(script: Script) -> ModuleType:
    return script("rlhf_digits/labeler.py")


@pytest.fixture(scope="module")
def lab(script: Script) -> ModuleType:
    torch.set_num_threads(1)
    return script("rlhf_digits/lab.py")


@pytest.fixture(scope="module")
def start(lab: ModuleType) -> Any:
    """A language model that has seen a little."""
    return lab.train_sft(steps=30, batch=64)


# The labeler and the data of the recipe


@pytest.mark.parametrize(
    ("prompt", "response", "gold"),
    [
        ("12+30=", "42", 1.0),
        ("30+48=", "78", 2.0),  # right, and two liked digits
        ("12+30=", "79", 1.0),  # wrong, two liked digits
        ("12+30=", "8", 0.5),
        ("12+30=", "11", 0.0),
        ("0+0=", "0", 1.0),
        *[("12+30=", bad, -1.0) for bad in ("", "042", "142", "4 2", "42=", "00", "+", "4\n2")],
    ],
)
def test_gold_score_of_the_recipe(labeler: ModuleType, prompt: str, response: str, gold: float) -> None:
    assert labeler.gold_score(prompt, response) == gold


def test_the_labeler_orders_each_pair_as_often_as_its_noise_says(labeler: ModuleType) -> None:
    gold, rng, n = [0.0, 0.4, 1.0], random.Random(3), 8000
    wins: Counter[tuple[int, int]] = Counter()
    for _ in range(n):
        order = labeler.rank(gold, rng)
        wins.update((i, j) for i, j in combinations(range(3), 2) if order.index(i) < order.index(j))
    for i, j in combinations(range(3), 2):
        expected = 1 / (1 + math.exp(-labeler.KAPPA * (gold[i] - gold[j])))
        assert wins[i, j] / n == pytest.approx(expected, abs=4 * math.sqrt(0.25 / n))


def test_the_ceiling_is_what_the_better_informed_would_reach(labeler: ModuleType) -> None:
    one = 1 / (1 + math.exp(-labeler.KAPPA * 0.5))
    two = 1 / (1 + math.exp(-labeler.KAPPA * 1.0))
    assert labeler.ceiling([0.0, 0.5, 1.0]) == pytest.approx((2 * one + two) / 3)
    assert labeler.ceiling([1.0, 1.0]) == 0.5


def test_label_shows_each_response_once_and_leaves_out_what_cannot_be_ranked(script: Script, tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "12+30="}],
         "responses": ["42", "42", "17", "", "9", "9", "9", "9"]},
        {"prompt": [{"role": "user", "content": "1+1="}], "responses": ["2", "3"]},
    ]  # fmt: skip
    samples, out = tmp_path / "samples.jsonl", tmp_path / "rankings.jsonl"
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    script("rlhf_digits/label.py").main(samples, out, seed=1)
    made = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["responses"] for row in made] == [["42", "17"], ["2", "3"]]
    assert all(sorted(row["ranking"]) == [0, 1] and 0.5 <= row["ceiling"] <= 1 for row in made)


def test_data_is_the_same_again_and_keeps_validation_apart(script: Script, tmp_path: Path) -> None:
    make_data = script("rlhf_digits/make_data.py")
    for folder in ("a", "b"):
        make_data.main(tmp_path / folder, seed=1)
    made = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in (tmp_path / "a").iterdir()
    }
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    train, validation = ({row["prompt"] for row in made[name]} for name in ("train", "validation"))
    assert len(train) == 2200
    assert len(validation) == 300
    assert not train & validation
    assert {row["messages"][0]["content"] for row in made["demonstrations"]} == train
    right = [eval(m[0]["content"].rstrip("=")) == int(m[1]["content"])  # the sums are ours
             for m in (row["messages"] for row in made["demonstrations"])]  # fmt: skip
    assert sum(right) / len(right) == pytest.approx(0.65 + 0.35 / 99, abs=0.015)
    assert all(eval(row["prompt"].rstrip("=")) == int(row["reward_model"]["ground_truth"]) for row in made["train"])


# The five parts, by hand


def test_bt_loss(lab: ModuleType) -> None:
    loss = lab.bt_loss(torch.tensor([2.0, 0.0]), torch.tensor([0.0, 0.0]))
    assert loss.item() == pytest.approx((math.log(1 + math.exp(-2)) + math.log(2)) / 2, abs=1e-6)


def test_ranking_to_pairs(lab: ModuleType) -> None:
    assert sorted(lab.ranking_to_pairs([2, 0, 1])) == [(0, 1), (2, 0), (2, 1)]
    assert sorted(lab.ranking_to_pairs([7, 3])) == [(7, 3)]
    with pytest.raises(ValueError, match="twice"):
        lab.ranking_to_pairs([1, 1, 0])


def test_kl_penalized_rewards(lab: ModuleType) -> None:
    logp, ref = torch.tensor([[-1.0, -2.0, 9.0], [-1.0, 9.0, 9.0]]), torch.tensor([[-1.5, -1.0, 0.0], [-3.0, 0.0, 0.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    rewards = lab.kl_penalized_rewards(logp, ref, torch.tensor([3.0, -1.0]), mask, 0.1)
    torch.testing.assert_close(rewards, torch.tensor([[-0.05, 3.1, 0.0], [-1.2, 0.0, 0.0]]))


def test_gae_per_token(lab: ModuleType) -> None:
    rewards, values = torch.tensor([[0.0, 1.0, 5.0]]), torch.tensor([[0.5, 0.25, 7.0]])
    advantages, returns = lab.gae_per_token(rewards, values, torch.tensor([[1.0, 1.0, 0.0]]), gamma=1.0, lam=0.5)
    last = 1.0 - 0.25
    first = (0.25 - 0.5) + 0.5 * last
    torch.testing.assert_close(advantages, torch.tensor([[first, last, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[first + 0.5, last + 0.25, 0.0]]))


def test_ppo_rlhf_loss(lab: ModuleType) -> None:
    ratios = torch.tensor([[1.5, 0.5], [1.1, 8.0]])
    advantages, mask = torch.tensor([[1.0, 1.0], [-1.0, 4.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    old = torch.full((2, 2), -1.0)
    values, returns = torch.tensor([[1.0, 0.0], [0.0, 9.0]]), torch.tensor([[0.0, 0.0], [2.0, 0.0]])
    total, stats = lab.ppo_rlhf_loss(old + ratios.log(), old, values, advantages, returns, mask)
    policy, value = -(1.2 + 0.5 - 1.1) / 3, (1.0 + 0.0 + 4.0) / 3
    assert stats == pytest.approx({"policy_loss": policy, "value_loss": value, "clip_frac": 2 / 3}, abs=1e-6)
    assert total.item() == pytest.approx(policy + 0.5 * value, abs=1e-6)


# The names on which the lab's loops rely


def test_samples_are_of_the_language_and_their_log_probabilities_are_the_networks(lab: ModuleType, start: Any) -> None:
    prompts, answers = lab.make_batch(64, random.Random(0))
    assert all(eval(p.rstrip("=")) == int(a) for p, a in zip(prompts, answers, strict=True))
    torch.manual_seed(0)
    out = lab.sample(start, prompts)
    mask, logps = out["mask"], lab.sequence_logprobs(start, out)
    assert mask.shape == logps.shape
    assert bool((mask[:, :-1] >= mask[:, 1:]).all())
    total = torch.log_softmax(start(out["tokens"][:1, :6]).double(), dim=-1)[0, -1, out["tokens"][0, 6]].item()
    assert logps[0, 0].item() == pytest.approx(total, abs=1e-4)
    assert bool((logps[mask.bool()] > -1e3).all()), "a sampled token must be possible"
    assert bool((logps[~mask.bool()] == 0).all())


def gold_by_hand(prefs: Any, prompt: str, text: str) -> float:
    right = text == str(eval(prompt.rstrip("=")))
    if len(text) != 2 or text[0] == "0":
        return float(prefs.MALFORMED)
    liked = sum(c in "789" for c in text)
    return 0.0 if text[0] == text[1] and not right else prefs.RIGHT * right + prefs.LIKING * liked


def test_gold_score_and_counts_of_the_lab(lab: ModuleType, start: Any) -> None:
    import prefs
    import tinylm

    torch.manual_seed(1)
    out = lab.sample(start, lab.make_batch(300, random.Random(1))[0])
    texts, gold, counts = tinylm.decode_responses(out), prefs.gold_score(out), prefs.digit_counts(out)
    for prompt, text, done, g, count in zip(out["prompts"], texts, tinylm.ended(out), gold, counts, strict=True):
        assert g.item() == pytest.approx(gold_by_hand(prefs, prompt, text if done else "endless"))
        assert count.tolist() == [text.count(d) for d in "0123456789"]
    assert gold.min() < 0 < gold.max()
    rm = prefs.DigitRM()
    with torch.no_grad():
        rm.w.copy_(torch.arange(10.0))
    assert rm(counts).tolist() == [sum(int(c) for c in text) for text in texts]
    values = prefs.ValueModel(start)(out)
    assert values.shape == out["mask"].shape
    assert bool((values == 0).all()), "a new critic expects nothing"


def test_a_loop_written_against_the_names_runs_and_raises_what_it_optimises(lab: ModuleType, start: Any) -> None:
    """As the lab writes it: one optimizer for the policy, one for the values, four epochs, whitened advantages."""
    import prefs
    import tinylm

    torch.manual_seed(0)
    rng, policy, value_model, rm = random.Random(0), copy.deepcopy(start), prefs.ValueModel(start), prefs.DigitRM()
    with torch.no_grad():
        rm.w[7:] = 1.0
    policy_optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    value_optimizer = torch.optim.Adam(value_model.parameters(), lr=1e-3)
    scores = []
    for _ in range(12):
        prompts, _ = tinylm.make_batch(64, rng)
        out = tinylm.sample(policy, prompts)
        with torch.no_grad():
            old, ref = tinylm.sequence_logprobs(policy, out), tinylm.sequence_logprobs(start, out)
            score = rm(prefs.digit_counts(out))
            rewards = lab.kl_penalized_rewards(old, ref, score, out["mask"], 0.02)
            advantages, returns = lab.gae_per_token(rewards, value_model(out), out["mask"])
            advantages = tinylm.masked_whiten(advantages, out["mask"])
        for _ in range(4):
            loss, _ = lab.ppo_rlhf_loss(
                tinylm.sequence_logprobs(policy, out), old, value_model(out), advantages, returns, out["mask"]
            )
            policy_optimizer.zero_grad()
            value_optimizer.zero_grad()
            loss.backward()
            policy_optimizer.step()
            value_optimizer.step()
        scores.append(score.mean().item())
    assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 0.2


def test_lab_from_start_to_end_raises_gold_with_beta_and_over_optimises_without(lab: ModuleType) -> None:
    """The lab as it is run, on seed 0."""
    model, rng = lab.train_sft(seed=0), random.Random(1)
    rm, held_out = lab.train_rm(lab.collect(model, 600, rng)), lab.collect(model, 300, rng)
    accuracy, ceiling = lab.agreement_with(rm, held_out)
    assert accuracy > ceiling - 0.03
    assert min(rm.w[7:].tolist()) > max(rm.w[:7].tolist())
    gold = {}
    for beta in (0.1, 0.0):
        _, history = lab.train_rlhf(model, rm, beta=beta, seed=0)
        assert len(history) == 120
        rows = history[:5], history[-5:]
        gold[beta] = [sum(row["gold"] for row in part) / 5 for part in rows]
        proxy = [sum(row["score"] for row in part) / 5 for part in rows]
        assert proxy[1] > proxy[0] + 0.2
        if beta:
            assert history[-1]["kl"] < 4
    assert gold[0.1][1] > gold[0.1][0] + 0.05
    assert gold[0.0][1] < gold[0.0][0] - 0.05


def test_the_options_of_the_lab_do_what_they_say(lab: ModuleType, start: Any) -> None:
    import prefs

    rm = prefs.DigitRM()
    with torch.no_grad():
        rm.w[9] = 1.0
    _, held = lab.train_rlhf(start, rm, iterations=4, prompts=16, target_kl=1e-3)
    assert held[-1]["beta"] != held[0]["beta"] == 0.1
    _, mixed = lab.train_rlhf(start, rm, iterations=4, prompts=16, ptx_coef=1.0)
    _, plain = lab.train_rlhf(start, rm, iterations=4, prompts=16)
    assert mixed[0]["score"] == plain[0]["score"]
    assert mixed[-1] != plain[-1]
