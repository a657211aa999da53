"""The torch sampler: what it samples, what it reports, and what it keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spaniel.models.hf import TinyLlama, new_llama
from spaniel.models.logprobs import policy_outputs
from spaniel.rollout.sampler import Request, SamplingParams
from spaniel.rollout.torch_sampler import TorchSampler, choose, truncate

EOS, VOCAB = 0, 40


def tiny(seed: int = 1) -> torch.nn.Module:
    shape = TinyLlama(hidden_size=32, intermediate_size=48, layers=2, heads=4, kv_heads=2, context=128)
    return new_llama(shape, vocab_size=VOCAB, eos_id=EOS, pad_id=1, seed=seed).eval()


def sampler(model: torch.nn.Module | None = None, **kwargs: int) -> TorchSampler:
    return TorchSampler(model or tiny(), lambda token: f"[{token}]", frozenset([EOS]), **kwargs)


def requests(count: int, seed: int = 0) -> list[Request]:
    random = np.random.default_rng(seed)
    return [Request((0, i), tuple(random.integers(2, VOCAB, 3 + i % 5).tolist()), (seed, i)) for i in range(count)]


def recomputed(model: torch.nn.Module, context: tuple[int, ...], new: tuple[int, ...], temperature: float) -> list:
    tokens = torch.tensor([[*context, *new]])
    actions = torch.zeros_like(tokens, dtype=torch.bool)
    actions[0, len(context) :] = True
    return policy_outputs(model, tokens, actions, temperature)[0][0, len(context) :].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_tempered_distribution_also_after_three_turns(temperature: float) -> None:
    model = tiny()
    own = sampler(model)
    params = SamplingParams(6, temperature)
    asked = requests(7)
    for turn in range(3):
        done = own.sample(asked, params)
        for request, span in zip(asked, done, strict=True):
            expected = recomputed(model, request.tokens, span.tokens, temperature)
            assert span.logprobs == pytest.approx(expected, abs=2e-6)
        # rows leave, the others go on with replies of different lengths
        asked = [
            Request(r.key, r.tokens + s.tokens + tuple(range(2, 4 + i + turn)), (turn, i))
            for i, (r, s) in enumerate(zip(asked, done, strict=True))
            if i % 3 != 2 and s.finish == "length"
        ]


def test_kept_cache_gives_what_a_fresh_one_gives() -> None:
    kept, fresh = sampler(), sampler()
    params = SamplingParams(5)
    first = kept.sample(requests(4), params)
    again = [
        Request(r.key, r.tokens + s.tokens + (7, 8, 9)[: i % 3 + 1], (9, i))
        for i, (r, s) in enumerate(zip(requests(4), first, strict=True))
    ]
    assert [s.tokens for s in kept.sample(again, params)] == [s.tokens for s in fresh.sample(again, params)]
    assert kept.sample([Request((0, 0), (5, 6), (1,))], params)  # a known key with other tokens starts anew


@pytest.mark.parametrize("max_rows", [1, 3, 64])
def test_a_completion_does_not_depend_on_its_batch_mates(max_rows: int) -> None:
    together = sampler(max_rows=max_rows).sample(requests(6), SamplingParams(8))
    for request, span in zip(requests(6), together, strict=True):
        alone = sampler().sample([request], SamplingParams(8))[0]
        assert alone.tokens == span.tokens
        assert alone.logprobs == pytest.approx(span.logprobs, abs=2e-6)


def test_the_seed_decides_and_order_does_not() -> None:
    asked = requests(5)
    one = sampler().sample(asked, SamplingParams(8))
    assert one == sampler().sample(asked, SamplingParams(8))
    backwards = sampler().sample(asked[::-1], SamplingParams(8))[::-1]
    assert [s.tokens for s in one] == [s.tokens for s in backwards]
    other = sampler().sample([Request(r.key, r.tokens, (99, *r.seed)) for r in asked], SamplingParams(8))
    assert [s.tokens for s in one] != [s.tokens for s in other]


def test_stop_strings_eos_and_limits() -> None:
    model = tiny()
    spans = sampler(model).sample(requests(40), SamplingParams(30, stop=("7][", "5]")))
    text = ["".join(f"[{t}]" for t in s.tokens) for s in spans]
    assert {s.finish for s in spans} >= {"stop", "eos"}
    for span, words in zip(spans, text, strict=True):
        if span.finish == "eos":
            assert span.tokens[-1] == EOS  # eos is an action, kept with its log-probability
        elif span.finish == "stop":
            assert "5]" in words or "7][" in words
            before = "".join(f"[{t}]" for t in span.tokens[:-1])  # the first token that completes it is the last
            assert "5]" not in before
            assert "7][" not in before
        else:
            assert len(span.tokens) == 30
        assert EOS not in span.tokens[:-1]
    limited = [Request(r.key, r.tokens, r.seed, i) for i, r in enumerate(requests(4))]
    assert [len(s.tokens) for s in sampler(model).sample(limited, SamplingParams(2))] <= [0, 1, 2, 2]
    assert sampler(model).sample(limited, SamplingParams(2))[0].finish == "length"


def test_greedy_takes_the_largest_and_ignores_the_seed() -> None:
    model = tiny()
    request = requests(1)[0]
    span = sampler(model).sample([request], SamplingParams(6, temperature=0.0))[0]
    context = list(request.tokens)
    for token in span.tokens:
        assert token == int(model(input_ids=torch.tensor([context])).logits[0, -1].argmax())
        context.append(token)
    assert span.logprobs == pytest.approx(recomputed(model, request.tokens, span.tokens, 1.0), abs=2e-6)


def test_new_weights_are_used_and_stamped() -> None:
    own, other = sampler(), tiny(seed=2)
    asked = requests(3)
    before = own.sample(asked, SamplingParams(6))
    own.load(other.state_dict(), version=7)
    after = own.sample(asked, SamplingParams(6))
    assert {s.version for s in before} == {0}
    assert {s.version for s in after} == {7}
    assert after == [
        type(s)(s.tokens, s.logprobs, 7, s.finish) for s in sampler(other).sample(asked, SamplingParams(6))
    ]


def test_two_requests_with_one_key_are_refused() -> None:
    with pytest.raises(ValueError, match="share a key"):
        sampler().sample([requests(1)[0]] * 2, SamplingParams(3))


def test_choose_samples_the_distribution_over_a_vocabulary_of_several_blocks() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(1, 700, generator=generator)
    count = 60_000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count  # every quantile once: no noise
    picked, logp = choose(logits.expand(count, -1), uniforms, SamplingParams(1, temperature=0.8))
    expected = torch.softmax(logits[0].double() / 0.8, -1)
    seen = torch.bincount(picked, minlength=700).double() / count
    assert float((seen - expected).abs().max()) < 5e-5
    assert torch.allclose(logp.double(), expected.log()[picked], atol=1e-5)


@given(st.integers(0, 699), st.floats(0, 1, exclude_max=True))
def test_choose_never_takes_an_impossible_token(only: int, uniform: float) -> None:
    logits = torch.full((1, 700), -torch.inf)
    logits[0, only] = 0.0
    assert int(choose(logits, torch.tensor([uniform]), SamplingParams(1))[0]) == only


def test_truncation_by_hand() -> None:
    log_probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert torch.isfinite(truncate(log_probs, 2, 1.0)).tolist() == [[True, True, False, False]]
    assert torch.isfinite(truncate(log_probs, 0, 0.6)).tolist() == [[True, True, False, False]]
    assert torch.isfinite(truncate(log_probs, 0, 0.81)).tolist() == [[True, True, True, False]]
    assert torch.isfinite(truncate(log_probs, 0, 1e-9)).tolist() == [[True, False, False, False]]
    # the log-probability reported is that of the untruncated distribution
    _, logp = choose(log_probs, torch.tensor([0.0]), SamplingParams(1, top_k=1))
    assert logp.tolist() == pytest.approx([float(np.log(0.5))])
