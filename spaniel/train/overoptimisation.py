"""Over-optimisation: where the reward that is learned from goes on rising while what is truly wanted falls.

(Gao et al. 2023, arXiv:2210.10760: proxy and gold score against sqrt(KL).)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """One step of a run."""

    step: int
    proxy: float
    gold: float | None
    kl: float | None
    """Sequence KL to the reference, in nats."""
    length: float

    @property
    def distance(self) -> float | None:
        """sqrt(KL); the k1 estimate of a small KL can be negative by chance, which counts as 0."""
        return None if self.kl is None else math.sqrt(max(0.0, self.kl))


@dataclass(frozen=True)
class Verdict:
    """What became of the gold score."""

    turn: Point | None
    """The step of the highest smoothed gold score, where it fell significantly behind it; None where it did not."""
    peak: float
    """The highest smoothed gold score ..."""
    end: float
    """... and the last one."""
    noise: float
    """Standard error of a smoothed value."""
    proxy_rise: float
    """The smoothed proxy at the end less that at the peak of the gold score."""

    @property
    def over_optimised(self) -> bool:
        return self.turn is not None


def points_of(rows: Sequence[Mapping[str, float]]) -> list[Point]:
    """The training steps of a run, from the lines of its metrics file."""
    return [
        Point(
            int(row["step"]),
            float(row["critic/score/mean"]),
            None if row.get("reward/gold") is None else float(row["reward/gold"]),
            None if row.get("critic/kl") is None else float(row["critic/kl"]),
            float(row.get("response_length/mean", 0.0)),
        )
        for row in rows
        if row.get("critic/score/mean") is not None
    ]


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Centred moving average over `window` values (odd), over fewer at the ends."""
    half = window // 2
    parts = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def window_of(count: int) -> int:
    """An odd window of about a twelfth of a run, at least 3."""
    return max(3, count // 12 | 1)


def judge(points: Sequence[Point], significance: float = 5.0) -> Verdict | None:
    """Whether, and where, the gold score turned down; None for a run without gold scores.

    The turn is the peak of the smoothed gold score. It counts as over-optimisation where the last smoothed value lies
    more than `significance` standard errors below it (the noise is that of the values about their own smooth line).
    Only means over a whole window are compared: those at the ends of the line are over fewer values, and noisier.
    """
    gold = [p.gold for p in points if p.gold is not None]
    window = window_of(len(points))
    if len(gold) < len(points) or len(points) < window:
        return None
    smooth, proxy = smoothed(gold, window), smoothed([p.proxy for p in points], window)
    half = window // 2
    end = len(points) - 1 - half
    peak = max(range(half, end + 1), key=lambda i: smooth[i])
    residual = sum((g - s) ** 2 for g, s in zip(gold, smooth, strict=True)) / max(1, len(gold) - len(gold) / window)
    noise = math.sqrt(residual / window)
    fell = smooth[end] < smooth[peak] - significance * noise
    return Verdict(points[peak] if fell else None, smooth[peak], smooth[end], noise, proxy[end] - proxy[peak])
