"""Pictures: three PNG files for any run, and a clear word where they cannot be."""

import sys

import pytest

from headrace.scripts.serving_metrics import Record
from headrace.scripts.serving_plots import Plots

GOOD = Record(sent_s=1.0, ended_s=2.0, events=((1.2, 1), (1.6, 2)))
ONE_TOKEN = Record(sent_s=1.0, ended_s=2.0, events=((1.2, 1),))
FAILED = Record(sent_s=1.1, ended_s=1.5, status="timeout")


@pytest.mark.parametrize("records", [[GOOD, FAILED], [FAILED], [ONE_TOKEN]])
def test_every_run_gives_three_pictures(tmp_path, records):
    paths = Plots(str(tmp_path / "a" / "b")).write(records)
    assert [path.name for path in paths] == ["ttft.png", "itl.png", "timeline.png"]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG\r\n")


def test_pictures_show_the_values_of_the_requests_that_succeeded(tmp_path):
    seen = {}

    class Kept(Plots):
        def _save(self, figure, name):
            seen[name] = figure
            return super()._save(figure, name)

    Kept(str(tmp_path)).write([GOOD, ONE_TOKEN, FAILED])
    assert seen["ttft"].axes[0].get_title() == "2 values"
    assert seen["itl"].axes[0].get_title() == "1 values"
    bars = seen["itl"].axes[0].patches
    assert sum(bar.get_height() for bar in bars) == 1
    above, below = seen["timeline"].axes
    # Two lines for each that succeeded, a red one for the one that failed.
    assert len(above.collections) == 5
    assert list(below.lines[0].get_ydata()) == [1, 2, 3, 2, 1, 0]


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        Plots(str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()
