"""The mathematics: pure functions of tensors and numbers, and the named algorithms made of them.

    from spaniel.algo import masked, kl, advantage, loss

These take plain tensors and can be used from any trainer: (B, T) tensors, a mask, no config. The named
algorithms (`ALGORITHMS`) are frozen dataclasses of vetted numbers; `catalogue()` describes them.
"""

from spaniel.algo import advantage, diagnostics, kl, loss, masked, mismatch
from spaniel.algo.base import Algorithm
from spaniel.algo.catalogue import ALGORITHMS, Entry, catalogue
from spaniel.algo.settings import KL, Mismatch

__all__ = [
    "ALGORITHMS",
    "KL",
    "Algorithm",
    "Entry",
    "Mismatch",
    "advantage",
    "catalogue",
    "diagnostics",
    "kl",
    "loss",
    "masked",
    "mismatch",
]
