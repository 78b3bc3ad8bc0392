"""Check `specjax.overlap.Overlapped` on eight devices against the sequential loop on one:

    python tests/overlapped.py             the cases of tests/process/test_overlap.py
    python tests/overlapped.py --all       every separable case of `toys`, with both kinds of noise
    python tests/overlapped.py --trace     a profile shows both programs at once
    python tests/overlapped.py --generate FOLDER    `generate(draft_mesh=)` and `--draft-mesh`

The script needs a process of its own, because the number of devices is fixed at the start.
"""

import argparse
import contextlib
import gzip
import io
import json
import os
import pathlib
import sys
import tempfile

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 "
    "--xla_backend_optimization_level=0"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from toys import TRANSFORMERS as toys

import specjax
from specjax.cli import main as command
from specjax.overlap import Overlapped
from specjax.overlap.outcomes import hit_rate
from specjax.parallel import make_mesh, shard_params

DEFAULT = (
    ("draft tree", "match", "1 + 3"),
    ("universal", "rejection", "2 + 2"),
)
ALL = tuple(
    (case, rule, meshes)
    for case in ("draft 1", "draft 3", "draft 6", "draft tree", "dynamic tree", "universal",
                 "translated tree", "translated dynamic tree")
    for rule in toys.NOISE_KINDS
    for meshes in ("2 + 2", "1 + 3", "4 + 4")
)  # fmt: skip


def meshes(name):
    """The meshes of the draft and of the target, and the rows that they divide."""
    devices = jax.devices()
    if name == "2 + 2":
        return make_mesh(devices=devices[:2]), make_mesh(devices=devices[2:4]), None
    if name == "1 + 3":
        return make_mesh(devices=devices[:1]), make_mesh(3, devices=devices[1:4]), [0, 1, 3]
    return make_mesh(2, devices=devices[:4]), make_mesh(2, devices=devices[4:]), None


def same(state, wanted, rows):
    """Texts and figures of a state are those of the sequential loop, for these rows."""
    texts, sequential = wanted
    assert toys.texts(state) == [texts[row] for row in rows]
    for ours, theirs in zip(
        jax.tree.leaves(state.stats), jax.tree.leaves(sequential.stats), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs[np.array(rows)])


def check(case, rule, name):
    draft_mesh, target_mesh, some = meshes(name)
    rows = list(range(toys.ROWS)) if some is None else some
    made = Overlapped(toys.decoder(case, rule), draft_mesh, target_mesh, outcomes=4, measures=False)
    params = toys.params(case)
    if case.startswith("draft") and draft_mesh.shape["model"] > 1:  # and not copied onto each
        source = made.decoder.proposer.source
        params = params.replace(proposer=shard_params(source.model, params.proposer, draft_mesh))
    params = made.place(params)

    # The same key gives the same tokens, and the same figures: every proposal is the same.
    for temperature in (0.0, 1.0):
        state = made.run(params, toys.prefill(made, params, some, temperature=temperature))
        same(state, toys.decoded(case, rule, temperature), rows)
        foresight = made.foresight(state)
        assert (foresight.hits <= foresight.asked).all()
        # After every step of a row but its last the draft needs a proposal.
        assert foresight.asked.sum() == state.stats.target_passes.sum() - len(rows)
    assert foresight.hits.sum() > 0, f"no outcome was foreseen: {hit_rate(foresight)}"

    # The order of rows does not matter, and a stream in chunks gives the same texts.
    turned = rows[::-1]
    state = toys.prefill(made, params, turned, temperature=1.0)
    *_, state = made.stream(params, state, steps_per_chunk=2)
    same(state, toys.decoded(case, rule, 1.0), turned)
    same(made.run(params, state, 3), toys.decoded(case, rule, 1.0), turned)  # nothing is left to do

    # An inserted row decodes as alone, and the others go on; a finished batch decodes it, too.
    if target_mesh.shape["data"] > 1:
        return  # a single row cannot be split
    for steps in (2, 2**31 - 1):
        state = made.run(params, toys.prefill(made, params, temperature=1.0), steps)
        row = toys.prefill(made, params, [2], temperature=1.0)
        state = made.run(params, made.insert(state, 1, row))
        same(state, toys.decoded(case, rule, 1.0), [0, 2, 2, 3])
    row = made.run(params, toys.prefill(made, params, [2], temperature=1.0))
    same(row, toys.decoded(case, rule, 1.0), [2])


def trace():
    """While the target's device executes a verification, the draft's device executes drafts; and
    not if they take turns."""
    devices, length = jax.devices(), 80
    shipped = pathlib.Path(__file__).parent.parent / "checkpoints" / "pycode"
    target, draft = (specjax.load(shipped / name) for name in ("target", "draft"))
    proposer = specjax.DraftModel(draft.model, target.model.vocab_size, 4)
    decoder = specjax.Decoder(target.model, proposer, specjax.Match(), (), length)
    meshes = [make_mesh(devices=[device]) for device in devices[:2]]
    made = Overlapped(decoder, *meshes, measures=False)
    params = made.place(specjax.Params(target.params, draft.params))
    settings = {"limit": np.full(4, length), "sampling": specjax.Sampling.create(4, 1.0)}
    settings["key"] = jax.random.split(specjax.make_key(0), 4)
    prompt, lengths = np.full((4, 8), 7, np.int32), np.full(4, 8, np.int32)
    shares = {}
    ahead = made._ways
    for name, ways in (("ahead", ahead), ("in turn", [None])):
        made._ways = ways
        made.run(params, made.prefill(params, prompt, lengths, **settings), 3)  # compiles
        state = jax.block_until_ready(made.prefill(params, prompt, lengths, **settings))
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder, create_perfetto_trace=True):
                jax.block_until_ready(made.run(params, state, 8))
            (file,) = pathlib.Path(folder).rglob("perfetto_trace.json.gz")
            shares[name] = at_once(json.load(gzip.open(file))["traceEvents"])
    print(shares, file=sys.stderr)
    assert shares["ahead"] > 0.5, shares
    assert shares["in turn"] == 0, shares


def at_once(events):
    """The share of the verifications during which the draft's device executed `prepare`."""
    spans = {"jit_verify": {}, "jit_prepare": {}}
    for event in events:
        given = event.get("args", {})
        runs = spans.get(given.get("hlo_module"))
        if runs is None:
            continue
        start, end = event["ts"], event["ts"] + event["dur"]
        before = runs.get(given["run_id"], (start, end))
        runs[given["run_id"]] = min(start, before[0]), max(end, before[1])
    verifying, preparing = (runs.values() for runs in spans.values())
    assert len(verifying) >= 8, len(verifying)
    both = [
        sum(max(min(end, b) - max(start, a), 0) for start, end in preparing) / (b - a)
        for a, b in verifying
    ]
    return sum(share > 0.05 for share in both) / len(both)


def generate(folder):
    import folders

    written = folders.write(folders.random_llama(1, initializer_range=0.5), "overlapped")
    plain, devices = specjax.load(written), jax.devices()
    options = {"max_new_tokens": 12, "seed": 5, "temperature": [1.0, 0.0, 0.7], "num_drafts": 3}
    options |= {"repetition_penalty": [1.2, 1.0, 1.1], "eos": [[], [7], []]}
    prompts = ["the cat sat on the", "the dog", "that cat sat, that"]
    wanted = specjax.generate(plain, prompts, draft=plain, **options)
    meshes = {
        "mesh": make_mesh(2, devices=devices[:4]),
        "draft_mesh": make_mesh(devices=devices[4:6]),
    }
    whole = specjax.generate(plain, prompts, draft=plain, **options, **meshes)
    assert (whole.tokens, whole.text, whole.finish) == (wanted.tokens, wanted.text, wanted.finish)
    assert whole.stats.accepted == wanted.stats.accepted
    pieces = list(specjax.generate(plain, prompts, draft=plain, stream=True, **options, **meshes))
    assert ["".join(row) for row in zip(*pieces, strict=True)] == wanted.text

    def told(*more):
        text, errors = io.StringIO(), io.StringIO()
        given = ["generate", "the dog", "--target", str(written), "--draft", str(written)]
        given += ["--max-new-tokens", "6", "--no-compare", *more]
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(errors):
            try:
                command(given)
            except SystemExit:
                return errors.getvalue()
        return text.getvalue(), errors.getvalue()

    def tokens_of(*more):
        text, errors = told("--json", *more)
        return json.loads(text)["tokens"], errors

    tokens = specjax.generate(plain, ["the dog"], max_new_tokens=6).tokens
    # 4 query heads do not divide among 3 devices; the target takes one, of the 8 that there are.
    found, words = tokens_of("--draft-mesh", "model=3")
    assert found == tokens and "the draft is whole on each device" in words, words
    found, words = tokens_of("--mesh", "data=1,model=2", "--draft-mesh", "model=2")
    assert found == tokens and "whole" not in words, words
    assert tokens_of("--mesh", "model=4,data=1", "--proposer", "draft")[0] == tokens
    assert "first draft" in told("--draft-mesh", "model=3", "--colour")[0]
    assert "--mesh takes 4 devices and --draft-mesh 6 more" in told(
        "--mesh", "data=1,model=4", "--draft-mesh", "model=6"
    )
    assert "do not divide among 3 devices" in told("--mesh", "data=1,model=3")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--generate", metavar="FOLDER")
    options = parser.parse_args()
    if options.trace:
        trace()
    elif options.generate:
        generate(options.generate)
    else:
        for case in ALL if options.all else DEFAULT:
            check(*case)
            print("equal:", *case, file=sys.stderr, flush=True)
            jax.clear_caches()  # a process may map only so many compiled programs
    print("done")


if __name__ == "__main__":
    main()
