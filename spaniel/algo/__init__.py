"""The mathematics: pure functions of tensors and numbers, and the named algorithms made of them.

    from spaniel.algo import masked, kl, advantage, loss

These take plain tensors and can be used from any trainer: (B, T) tensors, a mask, no config. The named
algorithms (`ALGORITHMS`) are frozen dataclasses of vetted numbers.
"""

from spaniel.algo import advantage, diagnostics, kl, loss, masked
from spaniel.algo.base import Algorithm
from spaniel.algo.grpo import GRPO
from spaniel.algo.ppo import PPO
from spaniel.algo.settings import KL

ALGORITHMS: dict[str, type[Algorithm]] = {"ppo": PPO, "grpo": GRPO}
"""Recipe name -> algorithm; its dataclass fields are the keys of the recipe's section `algorithm`."""

__all__ = ["ALGORITHMS", "GRPO", "KL", "PPO", "Algorithm", "advantage", "diagnostics", "kl", "loss", "masked"]
