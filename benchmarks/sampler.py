"""The torch sampler against `transformers`' own generate on the shipped tiny agent, in one run.

    python benchmarks/sampler.py [--rows 128] [--tokens 40] [--turns 3]

Both write the same number of tokens for the same prompts; over several turns generate has to read its context again,
while the sampler goes on from its cache.
"""

from __future__ import annotations

import argparse
import time

import torch

from spaniel.data.template import load_template
from spaniel.models.hf import load_causal_lm
from spaniel.rollout.sampler import Request, SamplingParams
from spaniel.rollout.torch_sampler import TorchSampler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="recipes/search_tiny/start")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model, template = load_causal_lm(given.model), load_template(given.model)
    prompt = template.render([{"role": "user", "content": "What is the capital of the country of ICN airport?"}])
    reply = template.encode("Doc 1(Title: x) SEL is the airport of Seoul in South Korea." * 2)

    def sampler() -> None:
        own = TorchSampler(model, template.piece, frozenset(), given.rows)
        tokens = [prompt] * given.rows
        for turn in range(given.turns):
            requests = [Request((0, i), tokens[i], (i, turn)) for i in range(given.rows)]
            spans = own.sample(requests, SamplingParams(given.tokens))
            tokens = [t + s.tokens + reply for t, s in zip(tokens, spans, strict=True)]

    def generate() -> None:
        tokens = torch.tensor([prompt] * given.rows)
        for _ in range(given.turns):
            with torch.inference_mode():
                done = model.generate(  # type: ignore[operator]
                    tokens, attention_mask=torch.ones_like(tokens), do_sample=True, max_new_tokens=given.tokens,
                    min_new_tokens=given.tokens, top_k=0, pad_token_id=template.pad_id,
                )  # fmt: skip
            tokens = torch.cat([done, torch.tensor([reply] * given.rows)], dim=1)

    seconds = {}
    for name, call in (("sampler", sampler), ("generate", generate), ("sampler again", sampler)):
        start = time.perf_counter()
        call()
        seconds[name] = time.perf_counter() - start
    count = given.rows * given.tokens * given.turns
    best = min(seconds["sampler"], seconds["sampler again"])
    print(f"{given.rows} rows, {given.turns} turns of {given.tokens} tokens, one thread")
    print(f"sampler {count / best:.0f} tokens/s, generate {count / seconds['generate']:.0f} tokens/s, "
          f"ratio {seconds['generate'] / best:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
