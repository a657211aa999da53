"""Learning from rankings: K forward passes give the loss and gradient of all K(K-1)/2 pairs, however it is cut."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import logsigmoid

from spaniel.data.collate import collate_rankings
from spaniel.data.preferences import Rendered
from spaniel.data.prompts import PromptStream
from spaniel.models.hf import TinyLlama, new_llama, save_model
from spaniel.models.reward import RewardModel, new_reward_model
from spaniel.train.reward_model import Preference, Training, evaluate_rankings, weights_of
from spaniel.types import Ranked, Ranking
from spaniel.workers.optim import Optim
from spaniel.workers.scoring import RewardLearner, whole_rankings

SHAPE = TinyLlama(hidden_size=16, intermediate_size=32, layers=2, heads=2, kv_heads=1, context=64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RewardModel:
    folder = tmp_path_factory.mktemp("lm")
    save_model(new_llama(SHAPE, vocab_size=23, eos_id=0, pad_id=1, seed=3), folder)
    return new_reward_model(folder, heads=1, seed=1)


def items(seed: int = 0, sizes: tuple[int, ...] = (4, 2, 6, 3)) -> list[Rendered]:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    out = []
    for number, size in enumerate(sizes):
        tokens = tuple((*draw(2, 23, 1 + draw(1, 8, 1)[0]), 0) for _ in range(size))
        ranks = (0, 1, *draw(0, 4, size - 2))
        ranking = Ranking(f"r{number}", (), ("x",) * size, ranks, None, 1.0 + number, 0.1 * number)
        out.append(Rendered(ranking, tokens))
    return out


def learner(model: RewardModel, micro_tokens: int = 10_000, frozen: bool = False, lr: float = 1e-3) -> RewardLearner:
    return RewardLearner(copy.deepcopy(model), Optim(lr=lr, max_grad_norm=1e6), micro_tokens, 10, frozen=frozen)


def training(own: RewardLearner, loss: Preference, subsample: float = 1.0) -> Training:
    return Training(own, PromptStream(items(), 2, 1, shuffle=True, drop_last=True), loss, 1, 1, subsample)


def gradient(own: RewardLearner) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in own.model.parameters() if p.grad is not None])


@pytest.mark.parametrize("average", ["ranking", "pair"])
def test_k_passes_are_all_the_pairs(model: RewardModel, average: str) -> None:
    """Against each pair pushed through the network by itself, both responses of it, in a plain loop."""
    loss = Preference(average=average)  # type: ignore[arg-type]
    rows, own, flat = items(), learner(model), copy.deepcopy(model)
    batch = collate_rankings(rows, weights_of(training(own, loss), rows), 1)
    found = own.learn(batch, loss)["rm/loss"].mean
    terms, shares = [], []
    for item in rows:
        pairs = [(a, b) for a, b in itertools.permutations(range(len(item.tokens)), 2)
                 if item.ranking.ranks[a] < item.ranking.ranks[b]]  # fmt: skip
        for a, b in pairs:
            first, second = (flat(torch.tensor([item.tokens[i]]), torch.tensor([len(item.tokens[i])])) for i in (a, b))
            terms.append(-logsigmoid(first - second - item.ranking.margin).squeeze())
            shares.append(item.ranking.weight / (len(pairs) if average == "ranking" else 1))
    weight = torch.tensor(shares) / sum(shares)
    expected = (weight * torch.stack(terms)).sum()
    expected.backward()
    assert found == pytest.approx(expected.item(), abs=1e-5)
    theirs = torch.cat([p.grad.flatten() for p in flat.parameters() if p.grad is not None])
    assert torch.allclose(gradient(own), theirs, atol=1e-5)


@settings(max_examples=15)
@given(budget=st.sampled_from([1, 20, 40, 60, 1000]), seed=st.integers(0, 5),
       name=st.sampled_from(["bradley_terry", "plackett_luce"]))  # fmt: skip
def test_the_step_does_not_depend_on_micro_batches(model: RewardModel, budget: int, seed: int, name: str) -> None:
    loss = Preference(name=name, center=0.01)  # type: ignore[arg-type]
    rows, whole, cut = items(seed), learner(model), learner(model, budget)
    batch = collate_rankings(rows, weights_of(training(whole, loss), rows), 1)
    one, other = whole.learn(batch, loss), cut.learn(batch, loss)
    for key, tally in one.items():
        assert other[key].mean == pytest.approx(tally.mean, abs=1e-5), key
    assert torch.allclose(gradient(whole), gradient(cut), atol=1e-5, rtol=1e-4)
    pieces = list(whole_rankings(batch, budget))
    assert sorted(torch.cat(pieces).tolist()) == list(range(len(batch)))
    for piece in pieces:
        for number in batch.rankings[piece].unique():
            assert int((batch.rankings[piece] == number).sum()) == int((batch.rankings == number).sum())


def test_plackett_luce_and_center_by_hand(model: RewardModel) -> None:
    """One ranking of three, order 1 2 0: -log of the two choices, and the mean square of the scores."""
    scored = torch.tensor([[0.5], [2.0], [-1.0]])
    batch = Ranked(torch.zeros(3, 2), torch.full((3,), 2), torch.zeros(3, dtype=torch.int64), torch.tensor([2, 0, 1]),
                   torch.zeros(3), torch.ones(3, 1))  # fmt: skip
    e = torch.tensor([0.5, 2.0, -1.0], dtype=torch.float64).exp()
    expected = -(e[1] / e.sum()).log() - (e[2] / (e[2] + e[0])).log() + 0.1 * (0.25 + 4 + 1) / 3
    assert Preference("plackett_luce", center=0.1)(scored, batch).item() == pytest.approx(expected.item(), abs=1e-6)


def test_frozen_features_learn_the_head_alone_and_the_same(model: RewardModel) -> None:
    loss, rows = Preference(), items()
    frozen, plain = learner(model, frozen=True), learner(model)
    batch = collate_rankings(rows, weights_of(training(frozen, loss), rows), 1)
    first, second = frozen.learn(batch, loss), plain.learn(batch, loss)
    assert first["rm/loss"].mean == pytest.approx(second["rm/loss"].mean, abs=1e-6)
    assert torch.allclose(frozen.model.head.weight.grad, plain.model.head.weight.grad, atol=1e-6)
    before = model.network.base_model.state_dict()
    assert all(torch.equal(x, before[n]) for n, x in frozen.model.backbone.state_dict().items())
    every = [ids for item in rows for ids in item.tokens]
    other = learner(frozen.model)
    assert torch.allclose(frozen.scores(every), other.scores(every), atol=1e-6)


def test_heads_of_an_ensemble_see_their_own_share(model: RewardModel, tmp_path: object) -> None:
    three = copy.deepcopy(model)
    three.network.score = torch.nn.Linear(16, 3, bias=False)
    own = training(learner(three), Preference(), subsample=0.5)
    rows = items(sizes=(2,) * 200)
    weights = weights_of(own, rows)
    assert weights.shape == (200, 3)
    seen = (weights > 0).double()
    assert ((seen.mean(dim=0) - 0.5).abs() < 0.12).all()
    assert not torch.equal(seen[:, 0], seen[:, 1])
    assert torch.equal(weights_of(own, rows[:7]) > 0, weights[:7] > 0)
    assert weights_of(training(own.learner, Preference()), rows).sum().item() == pytest.approx(1.0, abs=1e-5)


def test_it_learns_an_order_that_is_there(model: RewardModel) -> None:
    """The response with more of token 5 is the better one: new rankings are ordered right."""
    generator = torch.Generator().manual_seed(4)

    def ranking(number: int) -> Rendered:
        rows = torch.randint(2, 9, (4, 6), generator=generator)
        count = (rows == 5).sum(dim=1)
        ranks = tuple((-count).tolist())
        return Rendered(Ranking(str(number), (), ("x",) * 4, ranks), tuple((*r, 0) for r in rows.tolist()))

    every = [item for item in map(ranking, range(300)) if item.ranking.pairs]
    own, loss = learner(model, lr=3e-3), Preference()
    own = RewardLearner(own.model, Optim(lr=3e-3), 10_000, 200)
    fitting = training(own, loss)
    before = evaluate_rankings(own, every[240:])
    for step in range(150):
        part = every[(step * 16) % 224 : (step * 16) % 224 + 16]
        own.learn(collate_rankings(part, weights_of(fitting, part), 1), loss)
    after = evaluate_rankings(own, every[240:])
    assert before["val/accuracy"] < 0.7
    assert after["val/accuracy"] > 0.9
    assert after["val/spearman"] > 0.75
    assert after["val/loss"] < before["val/loss"]
