"""Settings that algorithms share, and their refusals. Keys are those of a recipe's section `algorithm`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from spaniel.algo import kl
from spaniel.errors import BadInput, nearest


def require(ok: bool, key: str, found: Any, expected: str) -> None:
    """BadInput that names the key, what was found and what was expected, unless `ok`."""
    if not ok:
        raise BadInput(f"algorithm.{key} is {found!r}; expected {expected}")


def choice(key: str, found: str, known: tuple[str, ...]) -> None:
    """BadInput unless `found` is one of `known`; names the nearest."""
    require(found in known, key, found, f"one of {', '.join(known)}{nearest(str(found), known)}")


@dataclass(frozen=True)
class KL:
    """How the policy is held near the reference: in one place, by one estimator.

    `place`: none (no reference is run), reward (subtracted from each action's reward) or loss (a term of the loss).
    `kind`: an estimator of `algo/kl.py`; auto is k1 in the reward and k3 in the loss.
    `beta`: the coefficient; 0 measures the KL and applies nothing.
    `controller`: fixed, or adaptive (in the reward only): beta moves so that the sequence KL meets `target`
    within about `horizon` sequences.
    `unbiased`: in the loss, the gradient is that of k2, which is the true gradient of the KL; False
    differentiates the estimator itself (k3's is biased).
    """

    place: Literal["none", "reward", "loss"] = "none"
    kind: str = "auto"
    beta: float = 0.04
    controller: Literal["fixed", "adaptive"] = "fixed"
    target: float = 6.0
    horizon: float = 10_000.0
    unbiased: bool = True

    def __post_init__(self) -> None:
        choice("kl.place", self.place, ("none", "reward", "loss"))
        choice("kl.kind", self.kind, ("auto", *kl.KINDS))
        choice("kl.controller", self.controller, ("fixed", "adaptive"))
        require(0 <= self.beta < math.inf, "kl.beta", self.beta, "a finite number of at least 0")
        require(
            self.estimator != "full",
            "kl.kind",
            self.kind,
            "an estimator from log-probabilities of sampled tokens (k1, abs, k2, k3): full needs the logits "
            "of both models at every token, which the loop does not keep; it is there as algo.kl.estimate",
        )
        if self.place == "loss":
            require(
                self.estimator != "k1",
                "kl.kind",
                self.kind,
                "k2, k3 or abs in the loss: the expected gradient of k1 as a loss is zero, it would hold nothing",
            )
        if self.controller == "adaptive":
            require(
                self.place == "reward",
                "kl.controller",
                self.controller,
                f"fixed where kl.place is {self.place!r}: the adaptive coefficient acts on rewards (kl.place: reward)",
            )
            require(0 < self.target < math.inf, "kl.target", self.target, "a number above 0 (nats per sequence)")
            require(0 < self.horizon < math.inf, "kl.horizon", self.horizon, "a number above 0 (sequences)")
            require(self.beta > 0, "kl.beta", self.beta, "a number above 0 for the adaptive controller to scale")

    @property
    def estimator(self) -> str:
        """The canonical name of the estimator in use."""
        if self.kind == "auto":
            return "k3" if self.place == "loss" else "k1"
        return kl.KINDS[self.kind]

    @property
    def needs_reference(self) -> bool:
        return self.place != "none"

    def initial_state(self) -> dict[str, float]:
        """The controller's state: {"beta": ...}, passed in and out of `Algorithm.targets` and checkpointed."""
        return {"beta": self.beta} if self.needs_reference else {}

    def coefficient(self, state: dict[str, float]) -> float:
        """beta of this step: the controller's, or the recipe's where it is fixed."""
        return state["beta"] if self.controller == "adaptive" else self.beta

    def next_state(self, state: dict[str, float], measured: float, sequences: int) -> dict[str, float]:
        """The state after a step with `measured` mean sequence KL over `sequences` rollouts."""
        if self.controller == "fixed":
            return self.initial_state()
        if not sequences:
            return dict(state)
        return {"beta": kl.adapt(state["beta"], measured, self.target, sequences, self.horizon)}
