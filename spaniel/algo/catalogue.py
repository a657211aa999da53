"""The named algorithms, and what to know about each before choosing it."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from spaniel.algo.base import Algorithm
from spaniel.algo.cispo import CISPO
from spaniel.algo.dapo import DAPO
from spaniel.algo.dr_grpo import DrGRPO
from spaniel.algo.grpo import GRPO
from spaniel.algo.gspo import GSPO
from spaniel.algo.opo import OPO
from spaniel.algo.ppo import PPO
from spaniel.algo.reinforce_plus_plus import ReinforcePlusPlus
from spaniel.algo.remax import ReMax
from spaniel.algo.rloo import RLOO

ALGORITHMS: dict[str, type[Algorithm]] = {
    "ppo": PPO,
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "rloo": RLOO,
    "reinforce_plus_plus": ReinforcePlusPlus,
    "remax": ReMax,
    "opo": OPO,
    "gspo": GSPO,
    "cispo": CISPO,
    "dapo": DAPO,
}
"""Recipe name -> algorithm; its dataclass fields are the keys of the recipe's section `algorithm`."""

_EQUATIONS = {
    "ppo": "A = whiten(GAE(gamma, lam)); loss -min(rho A, clip(rho) A); critic 0.5 max((V-R)^2, (clip(V)-R)^2)",
    "grpo": "A = (score - mean(group)) / (std(group) + 1e-6); loss -min(rho A, clip(rho) A) + beta KL",
    "dr_grpo": "A = score - mean(group); loss -min(rho A, clip(rho) A), summed / (sequences * length_budget)",
    "rloo": "A = score - mean(the group's others); loss -A log pi, score less beta (log pi - log ref)",
    "reinforce_plus_plus": "A = whiten(reward-to-go), reward less beta (log pi - log ref); loss as PPO's",
    "remax": "A = score - score(greedy rollout); loss -A log pi, score less beta (log pi - log ref)",
    "opo": "A = score - sum(length score) / sum(length) over the group; loss -A log pi",
    "gspo": "A as grpo; s = exp(mean over the row of log rho); loss -min(s A, clip(s) A)",
    "cispo": "A as grpo; loss -sg(min(rho, 1 + clip_high)) A log pi",
    "dapo": "A as grpo, groups without signal replaced; loss -min(rho A, clip(rho, 0.8, 1.28) A), mean over tokens",
}

_SOURCES = {
    "ppo": "Schulman et al. 2017, arXiv:1707.06347; defaults of Ouyang et al. 2022 (InstructGPT), arXiv:2203.02155",
    "grpo": "Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300",
    "dr_grpo": "Liu et al. 2025, arXiv:2503.20783",
    "rloo": "Ahmadian et al. 2024, arXiv:2402.14740",
    "reinforce_plus_plus": "Hu et al. 2025, arXiv:2501.03262",
    "remax": "Li et al. 2023, arXiv:2310.10505",
    "opo": "Hao et al. 2025, arXiv:2505.23585",
    "gspo": "Zheng et al. 2025, arXiv:2507.18071",
    "cispo": "MiniMax 2025 (MiniMax-M1), arXiv:2506.13585",
    "dapo": "Yu et al. 2025, arXiv:2503.14476",
}


@dataclass(frozen=True)
class Entry:
    """One algorithm: its recipe name, what it computes, its default settings (dotted keys), its paper."""

    name: str
    equation: str
    defaults: dict[str, Any]
    source: str


def catalogue() -> list[Entry]:
    """Every named algorithm, in the order of `ALGORITHMS`."""
    return [Entry(name, _EQUATIONS[name], _flat(cls(), ""), _SOURCES[name]) for name, cls in ALGORITHMS.items()]


def _flat(settings: Any, prefix: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for spec in fields(settings):
        value = getattr(settings, spec.name)
        out |= _flat(value, f"{prefix}{spec.name}.") if is_dataclass(value) else {f"{prefix}{spec.name}": value}
    return out
