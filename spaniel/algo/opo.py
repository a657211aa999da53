"""OPO: exact on-policy learning with the optimal baseline. Hao et al. 2025, arXiv:2505.23585."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spaniel.algo import advantage
from spaniel.algo.policy_gradient import Reinforce, check_group_size, grouped
from spaniel.algo.signal import Signal
from spaniel.types import Batch, Metrics, Targets


@dataclass(frozen=True, kw_only=True)
class OPO(Reinforce):
    """A_i = score_i - sum_j(length_j score_j) / sum_j(length_j) over the group; loss -A log pi.

    The length-weighted mean is the baseline of least variance where a rollout's gradient grows with its
    length. One update a step, no KL, no entropy bonus, no std, as in the paper.
    """

    group_size: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group_size(self.group_size)

    def _credit(self, signal: Signal, batch: Batch, values: Tensor | None) -> tuple[Targets, Metrics]:
        lengths = signal.actions.sum(1)
        relative = advantage.optimal_baseline(signal.totals, lengths, signal.groups, signal.usable)
        return grouped(signal, relative, self.group_size)
