"""The lab's language model: additions of two-digit numbers as text (`12+30=42`), on Spaniel's own network and shift.

A sampled batch `out` is a dict: `tokens` (B, P+T) prompt and response, `mask` (B, T) 1.0 on the response's real tokens
(its end token is one), `prompts` the P-character texts. Every (B, T) tensor is aligned with the response's tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spaniel.algo import masked
from spaniel.data.tokenizer import character_tokenizer
from spaniel.models.hf import TinyLlama, logits_at, new_llama

TEMPLATE = character_tokenizer("0123456789+=")
PROMPT, RESPONSE = 6, 4
"""Tokens: `12+30=`, and at most four of a response (a sum has two, then its end)."""
LOW, HIGH = 10, 50
NOISE = 0.25
IMPOSSIBLE = -1e4
"""A logit of probability 0 (finite, so that p log p is 0 too)."""


class TinyLM(nn.Module):
    """A causal transformer on characters; tokens i64 (B, L) -> logits (B, L, V).

    Its language is small: a response begins with two digits (no 0 first), and goes on with digits until it ends. What
    is not of the language has no probability, in sampling and in training alike (constrained decoding).
    """

    def __init__(self) -> None:
        super().__init__()
        shape = TinyLlama(hidden_size=64, intermediate_size=128, layers=2, heads=4, kv_heads=4, context=16)
        seed = int(torch.randint(2**31, ()))  # as for any network of torch: new weights by torch's generator
        self.network = new_llama(
            shape, vocab_size=len(TEMPLATE), eos_id=TEMPLATE.eos_id, pad_id=TEMPLATE.pad_id, seed=seed
        )
        digits = torch.zeros(len(TEMPLATE), dtype=torch.bool)
        digits[list(TEMPLATE.encode("0123456789"))] = True
        allowed = digits.repeat(RESPONSE + 1, 1)
        allowed[0, list(TEMPLATE.encode("0"))] = False
        allowed[2:, TEMPLATE.eos_id] = True
        self.register_buffer("allowed", allowed, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = logits_at(self.network, tokens).float()
        response = max(0, tokens.shape[1] - PROMPT + 1)
        held = torch.where(self.allowed[:response], logits[:, PROMPT - 1 :], IMPOSSIBLE)
        return torch.cat([logits[:, : PROMPT - 1], held], dim=1)


def make_batch(n: int, rng: random.Random) -> tuple[list[str], list[str]]:
    """`n` (prompts, answers): two numbers from 10 to 49, and their sum."""
    pairs = [(rng.randrange(LOW, HIGH), rng.randrange(LOW, HIGH)) for _ in range(n)]
    return [f"{a}+{b}=" for a, b in pairs], [str(a + b) for a, b in pairs]


@torch.no_grad()
def sample(policy: TinyLM, prompts: Sequence[str]) -> dict[str, Any]:
    """One response to each prompt, drawn at temperature 1 by torch's generator."""
    tokens = torch.tensor([TEMPLATE.encode(prompt) for prompt in prompts])
    mask = torch.zeros(len(prompts), RESPONSE)
    going = torch.ones(len(prompts), dtype=torch.bool)
    for t in range(RESPONSE):
        drawn = torch.multinomial(torch.softmax(policy(tokens)[:, -1], dim=-1), 1)[:, 0]
        mask[:, t] = going.float()
        tokens = torch.cat([tokens, torch.where(going, drawn, TEMPLATE.pad_id)[:, None]], dim=1)
        going = going & (drawn != TEMPLATE.eos_id)
    return {"tokens": tokens, "mask": mask, "prompts": list(prompts)}


def sequence_logprobs(model: TinyLM, out: dict[str, Any]) -> Tensor:
    """log pi of each response token, (B, T), 0 where the mask is 0."""
    logits, written = model(out["tokens"])[:, PROMPT - 1 : -1], out["tokens"][:, PROMPT:]
    logps = torch.log_softmax(logits, dim=-1).gather(-1, written[..., None])[..., 0]
    return torch.where(out["mask"].bool(), logps, 0.0)


def decode_responses(out: dict[str, Any]) -> list[str]:
    """The responses as text, without the end token."""
    rows = zip(out["tokens"][:, PROMPT:].tolist(), out["mask"].bool().tolist(), strict=True)
    return [TEMPLATE.text([token for token, real in zip(*row, strict=True) if real]) for row in rows]


def ended(out: dict[str, Any]) -> list[bool]:
    """Whether each response wrote its end token."""
    last = out["mask"].sum(dim=1).long() - 1
    return (out["tokens"][torch.arange(len(last)), PROMPT + last] == TEMPLATE.eos_id).tolist()


def demonstration(answer: str, rng: random.Random) -> str:
    """The sum; or, with the chance NOISE, any number of two digits."""
    return answer if rng.random() >= NOISE else str(rng.randrange(10, 100))


def sft_loss(model: TinyLM, n: int, rng: random.Random) -> Tensor:
    """Mean negative log-likelihood of `n` demonstrations, as people write them: some are wrong."""
    prompts, answers = make_batch(n, rng)
    shown = [demonstration(answer, rng) for answer in answers]
    rows = [[*TEMPLATE.encode(p + a), TEMPLATE.eos_id] for p, a in zip(prompts, shown, strict=True)]
    tokens = torch.full((n, PROMPT + RESPONSE), TEMPLATE.pad_id)
    mask = torch.zeros(n, RESPONSE)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
        mask[number, : len(row) - PROMPT] = 1.0
    return -masked_mean(sequence_logprobs(model, {"tokens": tokens, "mask": mask}), mask)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over the real tokens of the whole batch."""
    return masked.mean(x, mask)


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and variance 1 over the real tokens, 0 elsewhere."""
    return masked.whiten(x, mask)
