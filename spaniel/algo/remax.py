"""ReMax: REINFORCE with the greedy rollout as the baseline. Li et al. 2023, arXiv:2310.10505."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from spaniel.algo import advantage
from spaniel.algo.policy_gradient import Reinforce
from spaniel.algo.settings import KL
from spaniel.algo.signal import Signal
from spaniel.types import Batch, Metrics, Targets


@dataclass(frozen=True, kw_only=True)
class ReMax(Reinforce):
    """A = score - score of the greedy rollout of the same prompt (`Batch.baselines`); loss -A log pi.

    A row whose greedy rollout failed has no signal: advantage 0, and counted. Defaults as RLOO's, with one
    rollout of a prompt beside the greedy one.
    """

    loss_aggregation: str = "seq-mean-token-sum"
    kl: KL = field(default_factory=lambda: KL(place="reward", kind="k1", beta=0.05))

    @property
    def needs_greedy(self) -> bool:
        """True: the loop gives the score of a greedy rollout of each row's prompt in `Batch.baselines`."""
        return True

    def _credit(self, signal: Signal, batch: Batch, values: Tensor | None) -> tuple[Targets, Metrics]:
        if batch.baselines is None:
            raise ValueError("ReMax needs the score of a greedy rollout of each prompt (Batch.baselines), but got none")
        compared = signal.usable & batch.baselines.isfinite()
        relative = advantage.remax(signal.totals, batch.baselines, compared)
        lost = float((signal.usable & ~compared).sum())
        return Targets(advantage.spread(relative, signal.actions)), {"critic/rows/without_baseline": lost}
