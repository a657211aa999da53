"""Settings that algorithms share, and their refusals. Keys are those of a recipe's section `algorithm`."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from spaniel.algo import kl, mismatch
from spaniel.errors import BadInput, nearest


def require(ok: bool, key: str, found: Any, expected: str) -> None:
    """BadInput that names the key, what was found and what was expected, unless `ok`."""
    if not ok:
        raise BadInput(f"algorithm.{key} is {found!r}; expected {expected}")


def choice(key: str, found: str, known: tuple[str, ...]) -> None:
    """BadInput unless `found` is one of `known`; names the nearest."""
    require(found in known, key, found, f"one of {', '.join(known)}{nearest(str(found), known)}")


def _refuse_unread(settings: Any, section: str, names: tuple[str, ...], why: str) -> None:
    """BadInput for a setting that was changed although nothing reads it."""
    for spec in fields(settings):
        if spec.name in names:
            found = getattr(settings, spec.name)
            require(found == spec.default, f"{section}.{spec.name}", found, f"nothing: {why}, so it would not be read")


@dataclass(frozen=True)
class KL:
    """How the policy is held near the reference: in one place, by one estimator."""

    place: Literal["none", "reward", "loss"] = "none"
    """none: no reference is run; reward: subtracted from each action's reward; loss: a term of the loss."""
    kind: str = "auto"
    """An estimator of `algo/kl.py`; auto is k1 in the reward and k3 in the loss."""
    beta: float | None = None
    """The coefficient; it must be given where there is a place. 0 measures the KL and applies nothing."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """adaptive (in the reward only): beta moves so that the sequence KL comes to `target`."""
    target: float = 6.0
    """In nats per sequence; 6 and the horizon of 10,000 are those of Ziegler et al. 2019."""
    horizon: float = 10_000.0
    """The number of sequences in which a deviation is answered."""
    unbiased: bool = True
    """In the loss: the gradient is that of k2, the true gradient of the KL. False differentiates the estimator
    itself (k3's gradient is biased)."""

    def __post_init__(self) -> None:
        choice("kl.place", self.place, ("none", "reward", "loss"))
        choice("kl.kind", self.kind, ("auto", *kl.KINDS))
        choice("kl.controller", self.controller, ("fixed", "adaptive"))
        if self.place == "none":
            _refuse_unread(self, "kl", ("kind", "controller", "target", "horizon", "unbiased"), "kl.place is none")
            require(not self.beta, "kl.beta", self.beta, "no coefficient where kl.place is none: set reward or loss")
            return
        require(
            self.beta is not None and 0 <= self.beta < math.inf,
            "kl.beta",
            self.beta,
            f"a number of at least 0, since kl.place is {self.place} (0 measures the KL and applies nothing)",
        )
        self._check_estimator()
        if self.controller == "adaptive":
            self._check_controller()
        else:
            _refuse_unread(self, "kl", ("target", "horizon"), "kl.controller is fixed")

    def _check_estimator(self) -> None:
        if self.estimator == "full":
            expected = (
                "k1, abs, k2 or k3, which need the log-probabilities of the sampled tokens only: full needs the "
                "logits of both models at every token (it is there as algo.kl.estimate)"
            )
            require(False, "kl.kind", self.kind, expected)
        if self.place == "loss":
            expected = "k2, k3 or abs in the loss: the expected gradient of k1 as a loss is zero, it would hold nothing"
            require(self.estimator != "k1", "kl.kind", self.kind, expected)
        else:
            _refuse_unread(self, "kl", ("unbiased",), f"kl.place is {self.place}")

    def _check_controller(self) -> None:
        expected = f"fixed where kl.place is {self.place}: the adaptive coefficient acts on rewards"
        require(self.place == "reward", "kl.controller", self.controller, expected)
        require(0 < self.target < math.inf, "kl.target", self.target, "a number above 0 (nats per sequence)")
        require(0 < self.horizon < math.inf, "kl.horizon", self.horizon, "a number above 0 (sequences)")
        require(self.weight > 0, "kl.beta", self.beta, "a number above 0 for the adaptive controller to scale")

    @property
    def weight(self) -> float:
        """`beta` as a number."""
        return self.beta or 0.0

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
        return {"beta": self.weight} if self.needs_reference else {}

    def check_step(self, sequences: int) -> None:
        """Refuse an adaptive controller whose coefficient `sequences` rollouts a step could turn to 0 or below."""
        if self.controller == "adaptive":
            least = 0.2 * sequences
            expected = f"more than {least:g}, a fifth of the {sequences} sequences of a step"
            require(self.horizon > least, "kl.horizon", self.horizon, expected)

    def coefficient(self, state: dict[str, float]) -> float:
        """beta of this step: the controller's, or the recipe's where it is fixed."""
        return state["beta"] if self.controller == "adaptive" else self.weight

    def next_state(self, state: dict[str, float], measured: float, sequences: int) -> dict[str, float]:
        """The state after a step with `measured` mean sequence KL over `sequences` rollouts."""
        if self.controller == "fixed":
            return self.initial_state()
        if not sequences:
            return dict(state)
        return {"beta": kl.adapt(state["beta"], measured, self.target, sequences, self.horizon)}


@dataclass(frozen=True)
class Mismatch:
    """How the gap between the sampler's and the learner's probabilities is corrected (`algo/mismatch.py`)."""

    mode: Literal["none", "truncate", "mask"] = "none"
    """truncate: weights are at most `cap`; mask: an action whose weight is outside [1/cap, cap] is left out."""
    level: Literal["token", "sequence", "geometric"] = "token"
    cap: float = 2.0

    def __post_init__(self) -> None:
        choice("mismatch.mode", self.mode, mismatch.MODES)
        choice("mismatch.level", self.level, mismatch.LEVELS)
        require(1 < self.cap < math.inf, "mismatch.cap", self.cap, "a number above 1")
        if self.mode == "none":
            _refuse_unread(self, "mismatch", ("level", "cap"), "mismatch.mode is none")
