"""Line plots as SVG files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from spaniel.files import write_atomically


@dataclass(frozen=True)
class Line:
    """One series; `dashed` sets a baseline apart."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One plot: lines over a common axis, with a vertical mark where something happened."""

    title: str
    x_label: str
    lines: Sequence[Line]
    mark: float | None = None
    mark_label: str = ""


def draw(panels: Sequence[Panel], path: Path, columns: int = 2) -> None:
    """Write the panels, `columns` in a row, as one SVG file (the same data give the same file)."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.4 * rows), layout="constrained")
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, number + 1)
        for line in panel.lines:
            axes.plot(line.x, line.y, label=line.label, linestyle="--" if line.dashed else "-", linewidth=1.4)
        if panel.mark is not None:
            axes.axvline(panel.mark, color="0.4", linewidth=1.0, linestyle=":", label=panel.mark_label)
        axes.set_title(panel.title, fontsize=10)
        axes.set_xlabel(panel.x_label, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8, frameon=False)
    text = StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "spaniel"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    write_atomically(path, text.getvalue())
