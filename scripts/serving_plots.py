"""Pictures of a run: distributions of TTFT and ITL, and who ran when.

matplotlib is imported here, and only when a picture is wanted (extra `test`).
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.scripts.serving_metrics import Record


class Plots:
    """Writes PNG files into a folder.

    Args:
      folder: made where it does not exist.

    Raises:
      ValueError: matplotlib is not installed.
      OSError: the folder cannot be made.
    """

    def __init__(self, folder: str) -> None:
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ValueError(
                "--plots needs matplotlib: pip install matplotlib"
            ) from None
        self._figure_class = Figure  # of no window: nothing global is touched
        self._folder = pathlib.Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    def write(self, records: Sequence[Record]) -> list[pathlib.Path]:
        """Draws ttft.png, itl.png and timeline.png; returns their paths.

        A distribution without values is an empty picture, which says so.
        """
        good = [record for record in records if record.is_ok]
        ttft_ms = [record.ttft_s * 1e3 for record in good]
        itl_ms = [gap * 1e3 for record in good for gap in record.itl_s]
        return [
            self._distribution("ttft", "time to first token, ms", ttft_ms),
            self._distribution("itl", "inter-token latency, ms", itl_ms),
            self._timeline(records),
        ]

    def _distribution(
        self, name: str, label: str, values: Sequence[float]
    ) -> pathlib.Path:
        """A histogram, and the part of the values up to each."""
        figure = self._figure_class(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        axes.set_xlabel(label)
        axes.set_ylabel("count")
        axes.set_title(f"{len(values)} values")
        if values:
            axes.hist(values, bins=50, color="tab:blue", alpha=0.6)
            share = axes.twinx()
            ordered = np.sort(values)
            share.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered), "k")
            share.set_ylim(0, 1)
            share.set_ylabel("part up to here")
            for percent in (50, 95, 99):
                axes.axvline(np.percentile(values, percent), color="tab:red", lw=0.8)
        return self._save(figure, name)

    def _timeline(self, records: Sequence[Record]) -> pathlib.Path:
        """A line per request, its wait for the first token apart, and how many ran."""
        figure = self._figure_class(figsize=(9, 6), layout="constrained")
        above, below = figure.subplots(2, sharex=True, height_ratios=(3, 1))
        begin_s = min(record.sent_s for record in records)
        for place, record in enumerate(sorted(records, key=lambda r: r.sent_s)):
            sent_s, ended_s = record.sent_s - begin_s, record.ended_s - begin_s
            if not record.is_ok:
                above.hlines(place, sent_s, ended_s, color="tab:red")
                continue
            first_s = sent_s + record.ttft_s
            above.hlines(place, sent_s, first_s, color="tab:orange")
            above.hlines(place, first_s, ended_s, color="tab:blue")
        above.set_ylabel("request")
        above.set_title("orange: until the first token, blue: after it, red: failed")
        edges: list[tuple[float, int]] = []
        for record in records:
            edges += [(record.sent_s - begin_s, 1), (record.ended_s - begin_s, -1)]
        edges.sort()
        running = np.cumsum([change for _, change in edges])
        below.step([time_s for time_s, _ in edges], running, where="post")
        below.set_xlabel("seconds")
        below.set_ylabel("under way")
        return self._save(figure, "timeline")

    def _save(self, figure: Any, name: str) -> pathlib.Path:
        path = self._folder / f"{name}.png"
        figure.savefig(path, dpi=120)
        return path
