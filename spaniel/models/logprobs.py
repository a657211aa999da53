"""The one next-token shift, and log-probabilities from logits.

A causal network reads tokens[:, :t] and speaks about token t: its output at position t-1 belongs to token t.
Everything that leaves this file is aligned with the token itself, x[b, t] is about tokens[b, t]; position 0,
about which nothing is said, is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spaniel.models.hf import hidden_states, logits_at


def policy_outputs(
    model: nn.Module, tokens: Tensor, actions: Tensor, temperature: float = 1.0, *, entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies f32[B, T] at the actions, 0 elsewhere.

    log pi(token_t | tokens_<t) under softmax(logits / temperature), and the exact entropy of that
    distribution. Only positions at which some row has an action get logits.
    """
    batch, width = tokens.shape
    acting = actions[:, 1:]  # position 0 is never an action: nothing precedes it
    if actions[:, 0].any():
        raise ValueError("an action at position 0: there is no context to predict it from")
    columns = acting.any(dim=0).nonzero().flatten()
    zeros = torch.zeros(batch, width, dtype=torch.float32, device=tokens.device)
    if not len(columns):
        # A graph is kept so that a micro-batch without actions takes part in backward with gradient zero.
        return zeros + 0.0 * next(model.parameters()).sum(), zeros
    logits = logits_at(model, tokens[:, :-1], columns)
    rows, picked = acting[:, columns].nonzero(as_tuple=True)
    chosen = logits[rows, picked] / temperature
    log_probs = torch.log_softmax(chosen, dim=-1)
    target = tokens[rows, columns[picked] + 1]
    index = (rows, columns[picked] + 1)
    at_actions = log_probs.gather(1, target[:, None])[:, 0]
    out = zeros.index_put(index, at_actions)
    if not entropy:
        return out, zeros
    # p log p is 0 where p is 0, also where log p is -inf.
    entropies = -torch.where(log_probs > -1e4, log_probs.exp() * log_probs, 0.0).sum(-1)
    return out, zeros.index_put(index, entropies)


def values_for(backbone: nn.Module, head: nn.Module, tokens: Tensor) -> Tensor:
    """Values f32[B, T]: x[b, t] = V(tokens[b, :t]), the value of the state in which token t is chosen; 0 at t = 0."""
    states = hidden_states(backbone, tokens[:, :-1])
    values = head(states)[..., 0].float()
    return torch.cat([values.new_zeros(len(tokens), 1), values], dim=1)
