"""A sampler on plain torch: batched, with a key-value cache kept from one turn to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from spaniel.models.hf import SlotCache, decode
from spaniel.rollout.sampler import Request, SamplingParams
from spaniel.types import Sampled

_BLOCK = 256


@dataclass
class _Lane:
    """Rows that share a cache. `cached[i]` counts the tokens of row i whose keys and values are in it."""

    keys: list[tuple[int, ...]]
    tokens: list[list[int]]
    cached: list[int]
    cache: SlotCache


class TorchSampler:
    """Samples from any Hugging Face causal model whose layers are attention.

    `piece(token)` is the token's text (to spot stop strings), `eos_ids` end a completion. At most `max_rows`
    rows share a forward pass. Random numbers come from each request's own seed, so a completion does not
    depend on its batch mates.
    """

    def __init__(
        self, model: nn.Module, piece: Callable[[int], str], eos_ids: frozenset[int], max_rows: int = 128
    ) -> None:
        self.model = model
        self.piece = piece
        self.eos_ids = eos_ids
        self.max_rows = max_rows
        self.version = 0
        self._lanes: list[_Lane] = []

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take over `weights`; nothing is copied where the model is the learner's own object.

        Kept caches belong to the old weights and are forgotten.
        """
        own = self.model.state_dict()
        if any(own[name].data_ptr() != tensor.data_ptr() for name, tensor in weights.items()):
            self.model.load_state_dict(dict(weights))
        self.version = version
        self.release()

    def release(self) -> None:
        self._lanes = []

    @torch.inference_mode()
    def sample(self, requests: Sequence[Request], params: SamplingParams) -> list[Sampled]:
        """One completion per request, in order. A request whose key is known must continue its own tokens."""
        keys = [request.key for request in requests]
        if len(set(keys)) != len(keys):
            raise ValueError("sample: two requests share a key")
        found: dict[tuple[int, ...], Sampled] = {}
        for lane, part in self._assign(requests):
            found.update(zip(lane.keys, _continue(self, lane, part, params), strict=True))
        return [found[key] for key in keys]

    def _assign(self, requests: Sequence[Request]) -> list[tuple[_Lane, list[Request]]]:
        """Requests to the lanes that hold their caches; new requests to new lanes."""
        waiting = {request.key: request for request in requests}
        out: list[tuple[_Lane, list[Request]]] = []
        for lane in self._lanes:
            rows = [i for i, key in enumerate(lane.keys) if key in waiting and _continues(waiting[key], lane, i)]
            if rows:
                out.append((_keep_rows(lane, rows), [waiting.pop(lane.keys[i]) for i in range(len(rows))]))
        fresh = list(waiting.values())
        for start in range(0, len(fresh), self.max_rows):
            part = fresh[start : start + self.max_rows]
            out.append((_Lane([r.key for r in part], [[] for _ in part], [0] * len(part), SlotCache(self.model)), part))
        self._lanes = [lane for lane, _ in out]
        return out


def _continues(request: Request, lane: _Lane, row: int) -> bool:
    held = lane.tokens[row]
    return len(request.tokens) > lane.cached[row] and list(request.tokens[: len(held)]) == held


def _keep_rows(lane: _Lane, rows: list[int]) -> _Lane:
    if len(rows) < len(lane.keys):
        lane.cache.select(torch.tensor(rows))
        lane.keys = [lane.keys[i] for i in rows]
        lane.tokens = [lane.tokens[i] for i in rows]
        lane.cached = [lane.cached[i] for i in rows]
    return lane


def _prefill(model: nn.Module, lane: _Lane, requests: Sequence[Request]) -> Tensor:
    """Feed what the cache does not hold yet; next-token logits f32[B, V]."""
    if max(lane.cached) == 0:  # new rows: equal contexts (the samples of one prompt) are computed once
        unique = list(dict.fromkeys(request.tokens for request in requests))
        logits = _feed(model, lane.cache, [list(tokens) for tokens in unique], [0] * len(unique))
        order = {tokens: i for i, tokens in enumerate(unique)}
        rows = torch.tensor([order[request.tokens] for request in requests])
        if len(unique) < len(requests):
            lane.cache.select(rows)
        logits = logits[rows]
    else:
        new = [list(request.tokens[done:]) for request, done in zip(requests, lane.cached, strict=True)]
        logits = _feed(model, lane.cache, new, lane.cached)
    lane.tokens = [list(request.tokens) for request in requests]
    lane.cached = [len(request.tokens) for request in requests]
    return logits


def _feed(model: nn.Module, cache: SlotCache, new: list[list[int]], done: list[int]) -> Tensor:
    lengths = torch.tensor([len(tokens) for tokens in new])
    width = int(lengths.max())
    tokens = torch.zeros(len(new), width, dtype=torch.long)
    for row, ids in enumerate(new):
        tokens[row, : len(ids)] = torch.tensor(ids)
    positions = torch.tensor(done)[:, None] + torch.arange(width)
    return decode(model, cache, tokens, positions, lengths - 1)


def _continue(sampler: TorchSampler, lane: _Lane, requests: Sequence[Request], params: SamplingParams) -> list[Sampled]:
    """Sample one turn for every row of a lane; rows that have ended idle along until the last one ends."""
    limits = [min(params.max_tokens, params.max_tokens if r.max_tokens is None else r.max_tokens) for r in requests]
    uniforms = np.stack([_uniforms(request.seed, max(limits)) for request in requests])
    count = len(requests)
    tokens: list[list[int]] = [[] for _ in requests]
    logprobs: list[list[float]] = [[] for _ in requests]
    finish = ["" if limit > 0 else "length" for limit in limits]
    logits = _prefill(sampler.model, lane, requests)
    tails = [""] * count
    for step in range(max(limits)):
        picked, logp = choose(logits, torch.from_numpy(uniforms[:, step]), params)
        for row, (token, value) in enumerate(zip(picked.tolist(), logp.tolist(), strict=True)):
            if finish[row]:
                continue
            tokens[row].append(token)
            logprobs[row].append(value)
            tails[row], ended = _ends(tails[row], sampler.piece(token), params.stop)
            if token in sampler.eos_ids:
                finish[row] = "eos"
            elif ended:
                finish[row] = "stop"
            elif len(tokens[row]) >= limits[row]:
                finish[row] = "length"
        if all(finish):
            break
        positions = torch.tensor(lane.cached)[:, None]
        logits = decode(sampler.model, lane.cache, picked[:, None], positions, torch.zeros(count, dtype=torch.long))
        lane.cached = [n if finish[row] else n + 1 for row, n in enumerate(lane.cached)]
    for row, new in enumerate(tokens):
        lane.tokens[row] = lane.tokens[row] + new
    return [
        Sampled(tuple(tokens[i]), tuple(logprobs[i]), sampler.version, finish[i] or "length")  # type: ignore[arg-type]
        for i in range(count)
    ]


def _ends(tail: str, piece: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """The text so far (as much of it as a stop string needs), and whether a stop string is now complete."""
    if not stop:
        return "", False
    text = tail + piece
    reach = max(len(s) for s in stop) - 1
    return text[len(text) - reach :] if reach else "", any(s in text for s in stop)


def _uniforms(seed: tuple[int, ...], count: int) -> np.ndarray:
    """`count` numbers in [0, 1) that depend on `seed` alone."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed))).random(count)


def choose(logits: Tensor, uniforms: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """One token a row and its log-probability under softmax(logits / temperature).

    Greedy (temperature 0) takes the largest logit and reports its log-probability at temperature 1. With
    top_k or top_p the token comes from the truncated distribution; the log-probability reported is that of
    the untruncated one, which is what a learner recomputes.
    """
    if params.temperature == 0.0:
        picked = logits.argmax(-1)
        return picked, torch.log_softmax(logits, -1).gather(1, picked[:, None])[:, 0]
    log_probs = torch.log_softmax(logits / params.temperature, -1)
    picked = _inverse_cdf(truncate(log_probs, params.top_k, params.top_p).exp(), uniforms)
    return picked, log_probs.gather(1, picked[:, None])[:, 0]


def truncate(log_probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """`log_probs` with -inf outside the top_k likeliest and outside the smallest set that holds top_p."""
    if 0 < top_k < log_probs.shape[-1]:
        least = log_probs.topk(top_k, dim=-1).values[:, -1:]
        log_probs = torch.where(log_probs < least, -torch.inf, log_probs)
    if top_p < 1.0:
        ordered, index = log_probs.sort(dim=-1, descending=True)
        probs = torch.softmax(ordered, -1)
        outside = probs.cumsum(-1) - probs >= top_p  # the token that crosses top_p is inside
        log_probs = log_probs.masked_fill(torch.zeros_like(outside).scatter(1, index, outside), -torch.inf)
    return log_probs


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Index i with cdf(i-1) <= u < cdf(i), in two levels: blocks of 256, then within the block.

    Far cheaper than `torch.multinomial` over a large vocabulary, and one uniform number a row decides, which
    is what makes a row's sample its own.
    """
    rows, vocab = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -vocab % _BLOCK)).view(rows, -1, _BLOCK)
    sums = padded.double().sum(-1).cumsum(-1)
    total = sums[:, -1]
    # Strictly below the total, also where u * total rounds up: behind it there is no token with any weight.
    goal = torch.minimum(uniforms.double() * total, torch.nextafter(total, torch.zeros_like(total)))
    block = (sums <= goal[:, None]).sum(-1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    inner = padded[torch.arange(rows), block].double()
    within = (inner.cumsum(-1) <= (goal - before)[:, None]).sum(-1)
    # Rounding may point behind the last possible token: take the last one that has any weight.
    last = _BLOCK - 1 - (inner > 0).flip(-1).int().argmax(-1)
    return block * _BLOCK + torch.minimum(within, last)
