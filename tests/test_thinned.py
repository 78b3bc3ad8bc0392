"""The table of what runs by default names tests and cases that exist."""

import fnmatch

import pytest
import thinned


def test_every_pattern_fits_a_case():
    """Each test of the table keeps some of its cases and leaves out others."""
    files = {name.partition("::")[0] for name in thinned.COLLECTED}
    if not files >= {name.partition("::")[0] for name in thinned.KEPT}:
        pytest.skip("this needs all files of tests to be collected")
    unknown = [name for name in thinned.LONG if name not in thinned.COLLECTED]
    assert not unknown, f"there are no tests {unknown}"
    for name, patterns in thinned.KEPT.items():
        cases = thinned.COLLECTED[name]
        unfit = [pattern for pattern in patterns if not fnmatch.filter(cases, pattern)]
        assert not unfit, f"{name} has no case {unfit}"
        left = [case for case in cases if not thinned.stays(name, case)]
        assert left, f"every case of {name} runs by default: it needs no line in the table"
