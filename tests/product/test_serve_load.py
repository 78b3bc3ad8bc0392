"""More requests at once than in `tests/core/test_serve.py`."""

import load
import numpy as np


def test_no_text_depends_on_load():
    seeds = list(range(1000, 1060))
    with load.engine(slots=4) as made:
        before = made.compiled()
        served = load.under_load(made, seeds, np.random.default_rng(0), 0.2, threads=20)
        assert sorted(served) == seeds
        assert load.differences(made, seeds, served, generated=0.05)[0] == []
        assert made.compiled() == before
