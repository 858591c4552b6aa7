"""The soak script, for a second: it counts what it sent, and can fail."""

import pytest
from absl.testing import flagsaver

from headrace.scripts import soak


@pytest.fixture
def run(capsys):
    """Runs the script in this process: (exit code, what it printed)."""

    def whole(**values):
        if not soak.FLAGS.is_parsed():
            soak.FLAGS(["soak"])
        with flagsaver.flagsaver(config="tiny", minutes=0.02, **values):
            code = soak.main([])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return whole


def test_nothing_is_lost_or_held(run):
    code, printed = run(max_growth_mb=2000.0)
    assert code == 0
    assert " 0 lost, 0.000 of the pool held" in printed


def test_growth_beyond_the_bound_fails_it(run):
    code, printed = run(max_growth_mb=-1e6)
    assert code == 1 and "memory has grown" in printed
