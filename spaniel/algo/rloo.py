"""RLOO: REINFORCE with the mean of the other rollouts as the baseline. Kool et al. 2019; Ahmadian et al. 2024,
"Back to basics", arXiv:2402.14740."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from spaniel.algo import advantage
from spaniel.algo.policy_gradient import Reinforce, check_group_size, grouped
from spaniel.algo.settings import KL
from spaniel.algo.signal import Signal
from spaniel.types import Batch, Metrics, Targets


@dataclass(frozen=True, kw_only=True)
class RLOO(Reinforce):
    """A_i = score_i - mean of the group's other scores; loss -A log pi, summed over each sequence.

    The score holds the KL penalty, as in the paper, with its 4 rollouts of a prompt; beta 0.05 is TRL's.
    """

    group_size: int = 4
    loss_aggregation: str = "seq-mean-token-sum"
    kl: KL = field(default_factory=lambda: KL(place="reward", kind="k1", beta=0.05))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group_size(self.group_size)

    def _credit(self, signal: Signal, batch: Batch, values: Tensor | None) -> tuple[Targets, Metrics]:
        relative = advantage.leave_one_out(signal.totals, signal.groups, signal.usable)
        return grouped(signal, relative, self.group_size)
