"""Reward models: a Hugging Face sequence-classification network whose score is read at the last real token."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from spaniel.errors import BadInput
from spaniel.models.hf import config_of, hidden_states, load_classifier, load_config, save_model

Combine = Literal["mean", "min", "mean_minus_std"]


def combine(scores: Tensor, how: Combine, k: float = 1.0) -> Tensor:
    """One score f32[B] from those of an ensemble's n members, f32[B, n]: mean, min, or mean_minus_std, the mean less k
    standard deviations (unbiased; 0 for n = 1). The last two distrust what the members disagree about, which slows
    over-optimisation (Coste et al. 2024, arXiv:2310.02743)."""
    if how == "min":
        return scores.min(dim=1).values
    if how == "mean_minus_std" and scores.shape[1] > 1:
        return scores.mean(dim=1) - k * scores.std(dim=1)
    return scores.mean(dim=1)


class RewardModel(nn.Module):
    """r(x) = w . h(last real token of x), for each of n heads on one backbone.

    The last real token comes from lengths, never from a token id (padding may equal the end token). The scores are
    raw; `normalised` takes off the offset and divides by the scale that are stored with the model, both one a head.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    @property
    def backbone(self) -> nn.Module:
        return self.network.base_model  # type: ignore[return-value]

    @property
    def head(self) -> nn.Linear:
        return self.network.score  # type: ignore[return-value]

    @property
    def heads(self) -> int:
        return self.head.out_features

    def features(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Hidden states [B, H] at the last real token of right-padded `tokens` i64[B, T]."""
        states = hidden_states(self.backbone, tokens)
        return states[torch.arange(len(tokens), device=tokens.device), lengths - 1]

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Raw scores f32[B, n]."""
        return self.head(self.features(tokens, lengths)).float()

    def normalised(self, scores: Tensor) -> Tensor:
        """(scores - offset) / scale, f32[B, n]."""
        return (scores - self._stored("reward_offset", 0.0)) / self._stored("reward_scale", 1.0)

    def combined(self, scores: Tensor, how: Combine | None = None, k: float | None = None) -> Tensor:
        """One normalised score f32[B] from the heads' raw ones, as stored with the model unless told otherwise."""
        config = config_of(self.network)
        chosen: Any = how or getattr(config, "reward_combine", "mean")
        return combine(self.normalised(scores), chosen, getattr(config, "reward_k", 1.0) if k is None else k)

    def normalise_on(self, scores: Tensor, *, scale: bool) -> None:
        """Store the offset that makes `scores` (raw, f32[N, n]) 0 on average, and with `scale` the factor that gives
        them a standard deviation of 1."""
        config = config_of(self.network)
        config.reward_offset = scores.double().mean(dim=0).tolist()
        spread = scores.double().std(dim=0) if scale and len(scores) > 1 else torch.ones(self.heads)
        config.reward_scale = [x if x > 0 else 1.0 for x in spread.tolist()]

    def as_one_unit(self) -> tuple[Tensor, Tensor]:
        """(weight [1, H], bias [1]) of one linear unit that gives the mean of the heads' normalised scores."""
        scale = self._stored("reward_scale", 1.0)
        own = torch.zeros(self.heads) if self.head.bias is None else self.head.bias
        bias = ((own - self._stored("reward_offset", 0.0)) / scale).mean()
        return (self.head.weight / scale[:, None]).mean(dim=0, keepdim=True).detach(), bias.detach()[None]

    def _stored(self, name: str, default: float) -> Tensor:
        return torch.tensor(getattr(config_of(self.network), name, None) or [default] * self.heads)


def new_reward_model(
    folder: str | Path, *, heads: int, seed: int, layers: int | None = None, combine: Combine = "mean", k: float = 1.0
) -> RewardModel:
    """A reward model with fresh heads on the backbone in `folder`, of which the first `layers` layers are kept.

    Each head's weights are drawn with a standard deviation of 1 / sqrt(H + 1) (Stiennon et al. 2020,
    arXiv:2009.01325, appendix B), so that an ensemble's members start apart.
    """
    network, _ = load_classifier(folder, heads=heads, layers=layers)
    model = RewardModel(network)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        width = model.head.in_features
        model.head.weight.copy_(torch.randn(heads, width, generator=generator) / (width + 1) ** 0.5)
        if model.head.bias is not None:
            model.head.bias.zero_()
    config: Any = config_of(network)
    config.reward_combine, config.reward_k = combine, k
    return model.eval()


def is_reward_model(folder: str | Path) -> bool:
    """Whether the config in `folder` names a sequence-classification network."""
    named = getattr(load_config(folder), "architectures", None) or []
    return any("SequenceClassification" in name for name in named)


def load_reward_model(folder: str | Path) -> RewardModel:
    """The reward model in a Hugging Face sequence-classification folder (one that Spaniel saved, or another's).

    A folder without a head is refused: a head made anew would score at random.
    """
    network, missing = load_classifier(folder)
    if missing:
        raise BadInput(f"reward model {folder}: holds no weights for {', '.join(missing)}; expected a trained reward "
                       "model (sequence classification), not a language model")  # fmt: skip
    return RewardModel(network).eval()


def save_reward_model(model: nn.Module, folder: str | Path, *, pad_id: int | None) -> None:
    """Write a folder that `transformers` loads with `AutoModelForSequenceClassification`.

    It finds the last real token by the padding's id; where that is also the end token (`pad_id` None) the saved
    config names no padding, so that transformers scores one text at a time instead of a wrong position in silence.
    """
    assert isinstance(model, RewardModel)
    config_of(model.network).pad_token_id = pad_id
    save_model(model.network, folder)
