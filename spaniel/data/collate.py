"""Rollouts -> Batch, rankings -> Ranked: the only place where token ids become tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from spaniel.data.preferences import Rendered
from spaniel.types import Batch, Ranked, Rollout, Sampled, Score, Stop


def collate(rollouts: Sequence[Rollout], pad_id: int = 0) -> Batch:
    """One row a rollout, in order, right-padded to the longest length + 1.

    Who wrote a token comes from its span's type, never from its id. The score is credited to the row's last
    action; a step reward to the last token of its span. A rollout that is not valid (failed, or without any
    sampled token) has no action and no reward.
    """
    if not rollouts:
        raise ValueError("collate: no rollouts")
    rows, width = len(rollouts), max(r.length for r in rollouts) + 1
    tokens = np.full((rows, width), pad_id, dtype=np.int64)
    actions = np.zeros((rows, width), dtype=bool)
    logprobs = np.zeros((rows, width), dtype=np.float32)
    rewards = np.zeros((rows, width), dtype=np.float32)
    for row, rollout in enumerate(rollouts):
        _fill(rollout, tokens[row], actions[row], logprobs[row], rewards[row])
    return Batch(
        tokens=torch.from_numpy(tokens),
        actions=torch.from_numpy(actions),
        logprobs=torch.from_numpy(logprobs),
        rewards=torch.from_numpy(rewards),
        lengths=torch.tensor([r.length for r in rollouts], dtype=torch.int64),
        groups=torch.tensor([r.group for r in rollouts], dtype=torch.int64),
        versions=torch.tensor([min((s.version for s in r.sampled), default=0) for r in rollouts], dtype=torch.int64),
        valid=torch.tensor([r.valid for r in rollouts], dtype=torch.bool),
        truncated=torch.tensor([r.stop is Stop.OUT_OF_LENGTH for r in rollouts], dtype=torch.bool),
    )


def _fill(rollout: Rollout, tokens: np.ndarray, actions: np.ndarray, logprobs: np.ndarray, rewards: np.ndarray) -> None:
    at, last = 0, -1
    for span in rollout.spans:
        end = at + len(span.tokens)
        tokens[at:end] = span.tokens
        if isinstance(span, Sampled) and rollout.valid and span.tokens:
            actions[at:end] = True
            logprobs[at:end] = span.logprobs
            rewards[end - 1] += span.reward
            last = end - 1
        at = end
    if last >= 0 and isinstance(rollout.score, Score):
        rewards[last] += rollout.score.value


def collate_rankings(items: Sequence[Rendered], weights: torch.Tensor, pad_id: int = 0) -> Ranked:
    """One row a response, the rows of a ranking one after the other.

    `weights` f32[R, n] is each ranking's share of the loss of each of n heads (0: the head does not see it).
    """
    if not items:
        raise ValueError("collate_rankings: no rankings")
    sequences = [ids for item in items for ids in item.tokens]
    owner = torch.tensor([number for number, item in enumerate(items) for _ in item.tokens], dtype=torch.int64)
    return Ranked(
        tokens=padded(sequences, pad_id),
        lengths=torch.tensor([len(ids) for ids in sequences], dtype=torch.int64),
        rankings=owner,
        ranks=torch.tensor([rank for item in items for rank in item.ranking.ranks], dtype=torch.int64),
        margins=torch.tensor([item.ranking.margin for item in items], dtype=torch.float32)[owner],
        weights=weights.float()[owner],
    )


def padded(sequences: Sequence[Sequence[int]], pad_id: int = 0) -> torch.Tensor:
    """i64[B, T] of sequences of ids, padded on the right to the longest."""
    out = np.full((len(sequences), max(map(len, sequences))), pad_id, dtype=np.int64)
    for row, ids in enumerate(sequences):
        out[row, : len(ids)] = ids
    return torch.from_numpy(out)
