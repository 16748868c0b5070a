"""Pictures of what the other benchmarks left in a folder.

    python bench/plot.py [--results bench/results]            # needs the extra `plot`

    step-tp1*.json          step-time.png   time of a step against batch, one panel per context
                            roofline.png    steps against the measured ceilings
    quality-*.json          error.png       error of a pool's rows and of the logits, by format
    (nothing: the planner)  pages.png       pages against context, by cache mode

Lines and points differ by dash and marker, not by colour alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8kv_inductor.budget import plan_capacity
from fp8kv_inductor.config import CacheConfig, ConfigError

STYLES = {
    "eager bf16": {"color": "0.6", "linestyle": ":", "marker": "o", "markerfacecolor": "white"},
    "eager fp8": {"color": "0.6", "linestyle": ":", "marker": "^", "markerfacecolor": "white"},
    "compiled bf16": {"color": "0.35", "linestyle": "--", "marker": "o"},
    "compiled fp8": {"color": "0.0", "linestyle": "-", "marker": "^"},
}
"""Circles are bf16 rows, triangles fp8 rows; eager is light and dotted."""

MILLISECONDS = [digit * 10**power for power in range(-2, 4) for digit in (1, 2, 5)]
"""Labels of the axis of time."""

VRAM = 48 << 30
CONTEXTS = [1 << power for power in range(10, 20)]


def step_times(result: dict[str, Any]) -> dict[int, dict[str, list[tuple[int, float]]]]:
    """Context -> column -> (batch, milliseconds)."""
    panels: dict[int, dict[str, list[tuple[int, float]]]] = {}
    for row in result["rows"]:
        panel = panels.setdefault(row["context"], {})
        for column in STYLES:
            if f"{column} us" in row:
                panel.setdefault(column, []).append((row["batch"], row[f"{column} us"] / 1e3))
    return panels


def roofline(result: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Column -> (FLOP per byte, TFLOP per second)."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in result["rows"]:
        for column in STYLES:
            if f"{column} us" in row:
                moved = row[f"{column.rpartition(' ')[2]} MB"] * 1e6
                point = row["GFLOP"] * 1e9 / moved, row["GFLOP"] / row[f"{column} us"] * 1e3
                points.setdefault(column, []).append(point)
    return points


def pages_by_context(model: str, vram: int, tp: int) -> dict[str, list[tuple[int, int]]]:
    """Cache mode -> (context, pages that the planner finds room for)."""
    series: dict[str, list[tuple[int, int]]] = {}
    for mode in ("auto", "fp8_e4m3"):
        cache = CacheConfig.resolve(model, mode, "cpu")
        for context in CONTEXTS:
            try:
                capacity = plan_capacity(cache, vram, tp=tp, context=context)
            except ConfigError:
                continue
            series.setdefault(mode, []).append((context, capacity.pages.num_pages))
    return series


def errors(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Quantity -> row format -> error; the last file that has a format counts."""
    bars: dict[str, dict[str, float]] = {}
    for result in results:
        for name, found in result["formats"].items():
            row_error = found.get("row_error", {})
            for quantity, value in (
                ("KL divergence of the logits", found.get("kl")),
                ("error of the nope features", row_error.get("nope")),
                ("error of the rope features", row_error.get("rope")),
            ):
                if value is not None:
                    bars.setdefault(quantity, {})[name] = value
    return bars


def draw_step_times(result: dict[str, Any], path: Path) -> None:
    """Time of a step against batch."""
    import matplotlib.pyplot as plt

    panels = step_times(result)
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(1 + 3.2 * len(panels), 3.4),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, (context, lines) in zip(axes[0], panels.items(), strict=True):
        for column, points in lines.items():
            axis.loglog(*zip(*points, strict=True), label=column, markersize=5, **STYLES[column])
        batches = sorted({batch for points in lines.values() for batch, _ in points})
        axis.set_xticks(batches, labels=map(str, batches))
        low, high = axis.get_ylim()
        ticks = [tick for tick in MILLISECONDS if low <= tick <= high]
        axis.set_yticks(ticks, labels=map(str, ticks))
        axis.minorticks_off()
        axis.set(xlabel="batch", title=f"{context:,} tokens of context")
        axis.grid(color="0.9")
    axes[0][0].set_ylabel("ms per decode step")
    axes[0][-1].legend(frameon=False)
    figure.suptitle(_title(result), fontsize=9)
    _save(figure, path)


def draw_roofline(result: dict[str, Any], path: Path) -> None:
    """Steps against the measured ceilings."""
    import matplotlib.pyplot as plt

    bandwidth, peak = float(result["copy TB/s"]), float(result["matmul TFLOP/s"])
    points = roofline(result)
    intensities = [x for series in points.values() for x, _ in series]
    low, high = min(intensities) / 2, max(*intensities, peak / bandwidth) * 2
    figure, axis = plt.subplots(figsize=(5.6, 4))
    knee = peak / bandwidth
    axis.loglog([low, knee, high], [low * bandwidth, peak, peak], color="0.0", linewidth=1)
    label = {"fontsize": 8, "textcoords": "offset points"}
    axis.annotate(f"copy {bandwidth:.2f} TB/s", (low, low * bandwidth), xytext=(12, 2), **label)
    axis.annotate(f"matmul {peak:.0f} TFLOP/s", (high, peak), xytext=(0, 4), ha="right", **label)
    for column, series in points.items():
        style = {**STYLES[column], "linestyle": "none"}
        axis.loglog(*zip(*series, strict=True), label=column, markersize=5, **style)
    axis.set(xlabel="FLOP per byte that a step needs", ylabel="TFLOP/s", ylim=(None, 3 * peak))
    axis.grid(color="0.9")
    axis.legend(frameon=False)
    axis.set_title(_title(result), fontsize=8)
    _save(figure, path)


def draw_pages(series: dict[str, list[tuple[int, int]]], title: str, path: Path) -> None:
    """Pages against context."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5.2, 3.6))
    for (mode, points), column in zip(
        series.items(), ("compiled bf16", "compiled fp8"), strict=True
    ):
        axis.semilogx(*zip(*points, strict=True), label=mode, markersize=5, **STYLES[column])
    axis.set(xlabel="tokens of a request", ylabel="pages of 128 tokens", title=title)
    axis.set_ylim(bottom=0)
    axis.grid(color="0.9")
    axis.legend(frameon=False)
    _save(figure, path)


def draw_errors(bars: dict[str, dict[str, float]], path: Path) -> None:
    """Error by format; formats without error have no bar."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(bars), figsize=(1 + 3 * len(bars), 3.2), squeeze=False, layout="constrained"
    )
    for axis, (quantity, values) in zip(axes[0], bars.items(), strict=True):
        drawn = axis.barh(list(values), list(values.values()), color="0.55", edgecolor="0.0")
        axis.bar_label(drawn, fmt="%.2g", padding=2, fontsize=8)
        axis.margins(x=0.25)
        axis.set_title(quantity, fontsize=9)
        axis.invert_yaxis()
    _save(figure, path)


def _place(row: dict[str, Any]) -> tuple[int, int]:
    return row["context"], row["batch"]


def _title(result: dict[str, Any]) -> str:
    keys = ("device", "model", "layers", "experts", "tp", "torch", "triton")
    return ", ".join(f"{key} {result[key]}" for key in keys if key in result)


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    # Without the version of matplotlib: the same numbers give the same file.
    figure.savefig(path, bbox_inches="tight", dpi=120, metadata={"Software": None})
    plt.close(figure)
    print(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw what there is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    folder = parser.parse_args(arguments).results
    if steps := [json.loads(path.read_text()) for path in sorted(folder.glob("step-tp1*.json"))]:
        # Batches may have been measured one by one.
        rows = sorted((row for each in steps for row in each["rows"]), key=_place)
        result = {**steps[0], "rows": rows}
        draw_step_times(result, folder / "step-time.png")
        if "copy TB/s" in result:
            draw_roofline(result, folder / "roofline.png")
    if found := sorted(folder.glob("quality-*.json")):
        bars = errors([json.loads(path.read_text()) for path in found])
        draw_errors(bars, folder / "error.png")
    title = f"V4-Flash, two GPUs of {VRAM >> 30} GiB"
    draw_pages(pages_by_context("v4-flash", VRAM, tp=2), title, folder / "pages.png")


if __name__ == "__main__":
    main()
