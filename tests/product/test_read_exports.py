"""What `save_drafter` writes is what the packages of the layouts have read, and they compute our
logits from it: see tests/fixtures/drafters/read_exports.py.

`python tests/product/test_read_exports.py` prints the largest differences.
"""

import collections
import functools
import json
import pathlib
import sys
import tempfile
import warnings

import exports
import numpy as np
import published
import pytest
from published_target import target
from test_block_drafts import logits_along, pairs
from test_eagle3_published import logits_at_once, logits_in_turn

import specjax
from specjax.methods import FORMATS

sys.path.append(str(published.FIXTURES))

import read_exports

READ = sorted(file.stem for file in read_exports.KEPT.glob("*.json"))
_root = tempfile.TemporaryDirectory(prefix="specjax-tests-")


@functools.cache
def folders():
    """Today's exports, by name, with the name of the drafter."""
    read_exports.write(pathlib.Path(_root.name))
    names = {}
    for name in exports.SOURCES:
        format = next(f for f in FORMATS.values() if f.makes(exports.make(name)))
        for layout in format.layouts:
            names[read_exports.file_name(name, layout)] = name
    return {file: names[file] for file in names if (pathlib.Path(_root.name) / file).is_dir()}


def kept(name):
    """A fixture, and the name of the export that it is of."""
    made = json.loads((read_exports.KEPT / f"{name}.json").read_text())
    return made, name.removesuffix("-authors")


def test_every_export_was_read():
    """By a package, in each layout."""
    assert {name.removesuffix("-authors") for name in READ} == set(folders())


@pytest.mark.parametrize("name", READ)
def test_an_export_is_the_one_that_was_read(name):
    """Configuration, names, dtypes, shapes and every byte of the weights."""
    made, file = kept(name)
    assert file in folders()
    summary = read_exports.summary(pathlib.Path(_root.name) / file)
    assert summary == {key: made[key] for key in summary}


def difference(found, wanted, is_reduced):
    """The largest difference of logits [..., V] of the target from those of a package."""
    if is_reduced:
        assert (np.delete(found, exports.TOKENS, axis=-1) == -np.inf).all()
        found = found[..., exports.TOKENS]
    return np.abs(found - np.array(wanted)).max()


def largest_difference(name):
    """Of all logits and confidences of a fixture."""
    made, file = kept(name)
    named = folders()[file]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*norm_output=true is read as it is served")
        drafter = specjax.load_drafter(pathlib.Path(_root.name) / file, target())
    steps, is_reduced = made["steps"], exports.SOURCES[named][1] == "reduced"
    found, compared = [], collections.Counter()
    if isinstance(steps, dict):
        parallel = isinstance(drafter.source, specjax.PEagleSource)
        features = read_exports.features(len(drafter.source.taps))
        run = logits_at_once if parallel else logits_in_turn
        for step, t, logits in run(
            drafter, drafter.arrays(target()), features, read_exports.tokens().tolist()
        ):
            if step < len(steps["logits"]):
                found.append(difference(logits, steps["logits"][step][t], is_reduced))
                compared["logits"] += 1
        return max(found), compared
    for number, (source, params, logits, reading) in enumerate(pairs(drafter)):
        step, anchor = steps[number], published.ANCHORS[number]
        found.append(difference(np.asarray(logits[0]), step["logits"], is_reduced))
        drafts = step["drafts"] if "drafts" in step else published.path(number, source.depth)
        if source.correction is not None:
            along = logits_along(source, params, reading, anchor, drafts)
        if "corrected" in step:
            found.append(difference(along, step["corrected"], is_reduced))
        if "drafts" in step:
            assert along.argmax(1).tolist() == step["drafts"]
        if "scores" in step:
            scores = np.take_along_axis(along, np.array(step["candidates"]), axis=1)
            found.append(np.abs(scores - step["scores"]).max())
        if "confidence" in step:
            sure = confidences(source, params, reading, [anchor, *drafts])
            found.append(np.abs(sure - step["confidence"]).max())
        compared.update(step.keys())
    return max(found), compared


def confidences(source, params, reading, before):
    slots = [
        specjax.models.Slot(d, reading.hidden[:, d], None, np.array([[before[d]]]), None)
        for d in range(source.depth)
    ]
    own = params.own["correction"]
    return np.array([source.correction.confidence(own, slot)[0, 0] for slot in slots])


@pytest.mark.parametrize("name", READ)
def test_logits_are_those_of_the_package(name):
    largest, compared = largest_difference(name)
    assert largest < 1e-4
    correction = exports.SOURCES[folders()[kept(name)[1]]][0]
    correction = correction.correction if hasattr(correction, "correction") else None
    if isinstance(correction, specjax.models.MarkovHead):
        assert ("confidence" in compared) == correction.estimates
    assert compared["corrected"] or compared["drafts"] or compared["scores"] or correction is None


def main():
    rows = collections.defaultdict(list)
    for name in READ:
        made, file = kept(name)
        layout = max((x for x in read_exports.READERS if file.endswith(x)), key=len)
        kind = folders()[file].split(",")[0]
        rows[kind, layout, made["origin"].split(",")[0]].append(largest_difference(name)[0])
    print("| drafter | layout | read back by | exports | largest difference |")
    print("|---|---|---|---|---|")
    for row, found in rows.items():
        print(f"| {' | '.join(row)} | {len(found)} | {max(found):.1e} |")


if __name__ == "__main__":
    main()
