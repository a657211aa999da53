"""The learner: the same step whatever the micro-batches, row order or padding; what is skipped is counted."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spaniel.algo.grpo import GRPO
from spaniel.algo.settings import KL
from spaniel.data.collate import collate
from spaniel.errors import BadInput
from spaniel.models.hf import TinyLlama, new_llama
from spaniel.train.sft import nll
from spaniel.types import Batch, Counts, Observed, Prompt, Rollout, Sampled, Score, Stop, Targets
from spaniel.workers.checkpoint import load_optimizer, save_learner
from spaniel.workers.frozen import Frozen
from spaniel.workers.learner import Beside, Learner, Learning, micro_batches, policy_outputs_at
from spaniel.workers.optim import Optim, adamw, learning_rate

SHAPE = TinyLlama(hidden_size=16, intermediate_size=32, layers=1, heads=2, kv_heads=1, context=64)
MODEL = new_llama(SHAPE, vocab_size=23, eos_id=0, pad_id=1, seed=3).eval()
ALGORITHM = GRPO(group_size=4, kl=KL())
PROMPT = Prompt("p", ({"role": "user", "content": "q"},), ("x",))


def batch(rows: int = 8, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    rollouts = []
    for i in range(rows):
        ids = torch.randint(2, 23, (12,), generator=generator).tolist()
        first, reply, second = 1 + i % 4, 1 + i % 3, 1 + i % 2
        spans = (
            Observed(tuple(ids[:2])),
            Sampled(tuple(ids[2 : 2 + first]), (-3.0,) * first, 0, "stop"),
            Observed(tuple(ids[6 : 6 + reply])),
            Sampled(tuple(ids[9 : 9 + second]), (-3.0,) * second, 0, "stop"),
        )
        rollouts.append(Rollout(PROMPT, i // 4, spans, Stop.ANSWERED, score=Score(float(i % 3))))
    return collate(rollouts)


def learner(model: torch.nn.Module | None = None, lr: float = 1e-2, clip: float = 1.0, **kwargs: int) -> Learner:
    own = copy.deepcopy(MODEL if model is None else model)
    optim = Optim(lr=lr, max_grad_norm=clip)
    return Learner(own, policy_outputs_at(1.0), optim, Learning(**kwargs), total_updates=10, seed=5)


def targets(data: Batch) -> Targets:
    return ALGORITHM.targets(data, None, None, {})[0]


def weights(own: Learner) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in own.model.parameters()])


def gradient(own: Learner) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in own.model.parameters() if p.grad is not None])


@pytest.mark.parametrize("micro", [1, 20, 45, 10_000])
def test_the_step_does_not_depend_on_micro_batches(micro: int) -> None:
    data = batch()
    whole, parts = learner(micro_tokens=10_000), learner(micro_tokens=micro)
    one = whole.learn(data, targets(data), ALGORITHM.policy_loss, "actor")
    other = parts.learn(data, targets(data), ALGORITHM.policy_loss, "actor")
    assert torch.allclose(gradient(whole), gradient(parts), atol=1e-6)
    for name, tally in one.items():
        assert other[name].mean == pytest.approx(tally.mean, abs=1e-5), name


def test_nor_on_the_order_of_rows_nor_on_padding_nor_on_nan_in_it() -> None:
    data = batch()
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    wide = torch.nn.functional.pad
    padded = Batch(
        wide(data.tokens, (0, 7), value=9),
        wide(data.actions, (0, 7)),
        wide(data.logprobs, (0, 7), value=math.nan),
        wide(data.rewards, (0, 7)),
        data.lengths,
        data.groups,
        data.versions,
        data.valid,
        data.truncated,
    )
    expected = learner()
    expected.learn(data, targets(data), ALGORITHM.policy_loss, "actor")
    for changed in (data.take(order), padded):
        own = learner()
        own.learn(changed, targets(changed), ALGORITHM.policy_loss, "actor")
        assert torch.allclose(gradient(own), gradient(expected), atol=1e-6)


def test_observed_tokens_are_not_learned() -> None:
    """Altering the log-probabilities that stand at observed tokens moves nothing."""
    data = batch()
    changed = Batch(**{**vars(data), "logprobs": torch.where(data.actions, data.logprobs, torch.inf)})
    one, other = learner(), learner()
    one.learn(data, targets(data), ALGORITHM.policy_loss, "actor")
    other.learn(changed, targets(data), ALGORITHM.policy_loss, "actor")
    assert torch.equal(weights(one), weights(other))


def test_infer_restores_the_order_and_agrees_with_single_rows() -> None:
    data = batch()
    own = learner(micro_tokens=20)
    out = own.infer(data)
    for row in range(len(data)):
        alone = own.infer(data.take(torch.tensor([row])))
        assert torch.allclose(out[row], alone[0], atol=1e-6)
    assert torch.equal(Frozen(copy.deepcopy(MODEL), policy_outputs_at(1.0), 20).infer(data), out)


def test_the_first_update_on_fresh_rollouts_has_ratio_one() -> None:
    data = batch()
    own = learner()
    data = Batch(**{**vars(data), "logprobs": own.infer(data)})
    stats = own.learn(data, targets(data), ALGORITHM.policy_loss, "actor")
    assert stats["actor/ratio"].mean == pytest.approx(1.0, abs=1e-6)
    assert stats["actor/pg_clipfrac"].mean == 0.0


def test_updates_are_counted_as_the_schedule_counts_them() -> None:
    data = batch()
    own = learner(epochs=2, minibatch_rows=3)
    stats = own.learn(data, targets(data), ALGORITHM.policy_loss, "actor")
    assert own.stepper.updates == own.learning.updates(8) == 6
    assert stats["actor/grad_norm"].count == 6
    assert stats["actor/skipped_updates"].mean == 0
    first, second = (stats[f"actor/ppo_kl/epoch_{epoch}"] for epoch in (1, 2))
    assert first.count == second.count == int(data.actions.sum())
    assert (first + second).mean == pytest.approx(stats["actor/ppo_kl"].mean)
    assert "actor/ppo_kl/epoch_1" not in learner().learn(data, targets(data), ALGORITHM.policy_loss, "actor")


def test_the_denominators_are_those_of_the_mini_batch() -> None:
    data = batch()
    seen: list[tuple[Counts, int]] = []

    def spy(logprobs: torch.Tensor, entropy: torch.Tensor, part: Batch, goal: Targets, counts: Counts) -> tuple:
        seen.append((counts, int(part.actions.sum())))
        return ALGORITHM.policy_loss(logprobs, entropy, part, goal, counts)

    own = learner(minibatch_rows=3, micro_tokens=14)
    own.learn(data, targets(data), spy, "actor")
    assert len(seen) > own.stepper.updates == 3
    assert sorted({(c.sequences, c.actions) for c, _ in seen}, reverse=True)[0][0] == 3
    # micro-batches of one update share the counts, and their actions add up to them
    for counts in {c for c, _ in seen}:
        assert sum(n for c, n in seen if c is counts or c == counts) == counts.actions
    assert sum({id(c): c.actions for c, _ in seen}.values()) == int(data.actions.sum())


def test_a_batch_without_actions_is_skipped_and_counted() -> None:
    data = batch()
    empty = Batch(**{**vars(data), "actions": torch.zeros_like(data.actions)})
    own = learner()
    before = weights(own).clone()
    stats = own.learn(empty, targets(data), ALGORITHM.policy_loss, "actor")
    assert stats == {"actor/skipped_updates": stats["actor/skipped_updates"]}
    assert stats["actor/skipped_updates"].mean == 1
    assert torch.equal(weights(own), before)


def test_a_non_finite_gradient_is_skipped_and_counted() -> None:
    data = batch()
    own = learner()
    before = weights(own).clone()

    def broken(logprobs: torch.Tensor, *rest: object) -> tuple[torch.Tensor, dict]:
        return (logprobs * math.inf).sum(), {}

    stats = own.learn(data, targets(data), broken, "actor")
    infinite = Targets(torch.full_like(data.logprobs, math.inf))
    assert own.learn(data, infinite, ALGORITHM.policy_loss, "actor")["actor/skipped_updates"].mean == 1
    assert stats["actor/skipped_updates"].mean == 1
    assert torch.equal(weights(own), before)
    own.learn(data, targets(data), ALGORITHM.policy_loss, "actor")
    assert not torch.equal(weights(own), before)
    assert torch.isfinite(weights(own)).all()


def test_supervised_learning_lowers_the_loss_and_counts_only_what_is_demonstrated() -> None:
    data = batch()
    own = learner()
    blank = Targets(torch.zeros_like(data.logprobs))
    losses = [own.learn(data, blank, nll, "sft")["sft/nll"] for _ in range(30)]
    assert losses[0].count == int(data.actions.sum())
    assert losses[-1].mean < 0.5 * losses[0].mean


def test_learning_stopped_and_resumed_is_learning_uninterrupted(tmp_path: Path) -> None:
    data = batch()
    whole = learner(epochs=2, minibatch_rows=3)
    for _ in range(4):
        whole.learn(data, targets(data), ALGORITHM.policy_loss, "actor")
    half = learner(epochs=2, minibatch_rows=3)
    for _ in range(2):
        half.learn(data, targets(data), ALGORITHM.policy_loss, "actor")
    save_learner(half, tmp_path, "policy", lambda model, folder: model.save_pretrained(folder))
    from spaniel.models.hf import load_causal_lm

    resumed = learner(load_causal_lm(tmp_path / "policy"), epochs=2, minibatch_rows=3)
    load_optimizer(resumed, tmp_path, "policy")
    for _ in range(2):
        resumed.learn(data, targets(data), ALGORITHM.policy_loss, "actor")
    assert torch.equal(weights(whole), weights(resumed))
    with pytest.raises(BadInput, match=r"critic\.optimizer\.pt"):
        load_optimizer(resumed, tmp_path, "critic")


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 100))
def test_micro_batches_hold_every_row_once_within_the_limit(lengths: list[int], limit: int) -> None:
    sizes = torch.tensor(lengths)
    parts = list(micro_batches(sizes, torch.arange(len(lengths)), limit))
    assert sorted(int(i) for rows, _ in parts for i in rows) == list(range(len(lengths)))
    for rows, width in parts:
        assert width == int(sizes[rows].max()) + 1
        assert len(rows) == 1 or len(rows) * width <= limit


def test_learning_rates_by_hand() -> None:
    assert [learning_rate(Optim(lr=1.0, warmup_steps=4), i, 10) for i in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    linear = Optim(lr=1.0, schedule="linear", warmup_ratio=0.2)
    assert [learning_rate(linear, i, 11) for i in (0, 1, 2, 6, 10)] == [0.5, 1.0, 1.0, 0.5, 0.0]
    cosine = Optim(lr=2.0, schedule="cosine", min_lr_ratio=0.1)
    assert learning_rate(cosine, 0, 5) == 2.0
    assert learning_rate(cosine, 2, 5) == pytest.approx(2 * (0.1 + 0.9 * 0.5))
    assert learning_rate(cosine, 4, 5) == pytest.approx(0.2)
    assert learning_rate(cosine, 9, 5) == pytest.approx(0.2)  # beyond the end it stays
    assert learning_rate(Optim(lr=1.0, warmup_steps=4, schedule="cosine"), 3, 4) == 1.0  # warm-up is all there is


def test_decay_spares_norms_and_biases() -> None:
    decayed, spared = adamw(MODEL, Optim(weight_decay=0.1)).param_groups
    assert decayed["weight_decay"] == 0.1
    assert all(p.dim() >= 2 for p in decayed["params"])
    assert spared["weight_decay"] == 0.0
    assert all(p.dim() == 1 for p in spared["params"])


def test_a_second_loss_adds_its_share_of_the_gradient() -> None:
    """PPO-ptx: grad(actor loss) + coef * grad(mean nll of the rows of that update), each rebuilt by autograd alone."""
    data, shown, coef = batch(seed=0), batch(seed=1), 0.7
    own = learner(lr=1e-3, clip=1e9)  # clipping would scale what is left in .grad
    beside = Beside(shown, nll, coef, rows=3)
    stats = own.learn(data, targets(data), ALGORITHM.policy_loss, "actor", beside)
    model = copy.deepcopy(MODEL)
    rows = shown.take(torch.arange(3))
    logits = torch.log_softmax(model(rows.tokens).logits[:, :-1].double(), dim=-1)
    told = logits.gather(-1, rows.tokens[:, 1:, None])[..., 0]
    expected = -(told * rows.actions[:, 1:]).sum() / rows.actions.sum()
    assert stats["actor/ptx_loss"].mean == pytest.approx(expected.item(), abs=1e-5)
    (coef * expected).backward()
    alone = learner(lr=1e-3, clip=1e9)
    alone.learn(data, targets(data), ALGORITHM.policy_loss, "actor")
    by_hand = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert torch.allclose(gradient(own), gradient(alone) + by_hand, atol=1e-5)


def test_each_update_gets_its_own_rows_of_the_second_loss() -> None:
    beside = Beside(batch(), nll, 1.0, rows=3)
    assert [beside.of(update).tolist() for update in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 0]]
