"""What every sampler owes, run on the torch sampler and on the fake."""

from __future__ import annotations

from typing import Any

import pytest

from spaniel.rollout.sampler import Request, SamplingParams
from spaniel.rollout.torch_sampler import TorchSampler
from tests.fakes.sampler import ScriptedSampler
from tests.rollout.test_torch_sampler import EOS, tiny


def piece(token: int) -> str:
    return f"[{token}]"


def made(name: str) -> Any:
    eos = frozenset([EOS])
    if name == "torch":
        return TorchSampler(tiny(), piece, eos)
    return ScriptedSampler(lambda r: [(sum(r.seed) + i) % 7 for i in range(50)], piece, eos)


def asked(count: int) -> list[Request]:
    return [Request((0, i), (3, 4, 5 + i), (1, i)) for i in range(count)]


@pytest.mark.parametrize("name", ["torch", "fake"])
def test_the_contract(name: str) -> None:
    sampler = made(name)
    params = SamplingParams(12, stop=("5]",))
    spans = sampler.sample(asked(30), params)
    assert len(spans) == 30
    assert spans == made(name).sample(asked(30), params)  # the seed decides
    for span in spans:
        assert 0 < len(span.tokens) <= 12
        assert len(span.logprobs) == len(span.tokens)
        assert all(value <= 0 for value in span.logprobs)
        text = "".join(map(piece, span.tokens))
        assert (span.finish == "eos") == (span.tokens[-1] == EOS)
        assert (span.finish == "stop") == ("5]" in text)
        assert "5]" not in "".join(map(piece, span.tokens[:-1]))
        if span.finish == "length":
            assert len(span.tokens) == 12
    assert {span.version for span in spans} == {0}
    sampler.release()
    assert sampler.sample([], params) == []
    tight = [Request(r.key, r.tokens, r.seed, 1) for r in asked(3)]
    assert all(len(span.tokens) == 1 for span in sampler.sample(tight, params))
