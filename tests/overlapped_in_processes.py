"""Run as one of two processes with two devices each, for `tests/process/test_overlap.py`:

python tests/overlapped_in_processes.py HOST:PORT ID [--generate]

The draft has the devices of the first process, and the target those of the second.  It compares
texts with those of one device, and then decodes until it is killed.  With --generate it checks
`generate(draft_mesh=)` and `--draft-mesh` instead, where the target has the first process.
"""

import contextlib
import io
import json
import sys

from specjax.parallel.processes import join, leaving

if __name__ == "__main__":
    join(sys.argv[1], 2, int(sys.argv[2]))

import folders
import jax
import pytest
from toys import TRANSFORMERS as toys

import specjax
from specjax.cli import main as command
from specjax.overlap import Overlapped
from specjax.parallel import make_mesh


def laws():
    devices = jax.devices()
    assert len(devices) == 4 and len(jax.local_devices()) == 2
    meshes = make_mesh(devices=devices[:2]), make_mesh(2, devices=devices[2:])
    for case, rule in (("draft 3", "match"), ("draft tree", "rejection")):
        made = Overlapped(toys.decoder(case, rule), *meshes, measures=False)
        params = made.place(toys.params(case))
        state = made.run(params, toys.prefill(made, params, temperature=1.0))
        texts, sequential = toys.decoded(case, rule, 1.0)
        assert toys.texts(state) == texts
        assert state.stats.accepted.tolist() == sequential.stats.accepted.tolist()
        foresight = made.foresight(state)
        assert 0 < foresight.hits.sum() < foresight.asked.sum()
        assert (state.target is None) != (state.draft is None), "each process has its own half"
    print("going on", file=sys.stderr, flush=True)
    while True:
        made.run(params, toys.prefill(made, params, temperature=1.0))


def generate():
    """The text of one device, in one call and in pieces, in both processes."""
    written = folders.write(
        folders.random_llama(1, initializer_range=0.5), f"two-{jax.process_index()}"
    )
    plain, devices = specjax.load(written), jax.devices()
    options = {"max_new_tokens": 12, "seed": 5, "temperature": [1.0, 0.0, 0.7], "num_drafts": 3}
    options |= {"repetition_penalty": [1.2, 1.0, 1.1], "eos": [[], [7], []]}
    prompts = ["the cat sat on the", "the dog", "that cat sat, that"]
    wanted = specjax.generate(plain, prompts, draft=plain, **options)
    with pytest.raises(ValueError, match="pass mesh= too, the same in every process"):
        specjax.generate(plain, prompts, draft=plain, draft_mesh=make_mesh(devices=devices[2:]))
    mesh, draft_mesh = make_mesh(devices=devices[:2]), make_mesh(devices=devices[2:])
    laid = specjax.load(written, mesh=mesh)
    draft = specjax.load(written, mesh=draft_mesh)
    whole = specjax.generate(laid, prompts, draft=draft, draft_mesh=draft_mesh, **options)
    assert (whole.tokens, whole.text, whole.finish) == (wanted.tokens, wanted.text, wanted.finish)
    assert whole.stats.accepted == wanted.stats.accepted
    assert whole.stats.hit_rate is not None, "every process has the counts of the draft"
    pieces = list(
        specjax.generate(laid, prompts, draft=draft, draft_mesh=draft_mesh, stream=True, **options)
    )
    assert ["".join(row) for row in zip(*pieces, strict=True)] == wanted.text

    given = ["generate", "the dog", "--target", str(written), "--draft", str(written)]
    given += ["--max-new-tokens", "6", "--mesh", "data=1,model=2", "--draft-mesh", "model=2"]
    tokens = specjax.generate(plain, ["the dog"], max_new_tokens=6, proposer="none").tokens
    with contextlib.redirect_stdout(io.StringIO()) as text:
        command([*given, "--json"])
    found = json.loads(text.getvalue())
    assert found["tokens"] == tokens and found["stats"]["same_tokens"] is None
    with contextlib.redirect_stdout(io.StringIO()) as text:
        command([*given, "--colour"])
    assert "first draft" in text.getvalue() and "drafted in time" in text.getvalue()
    print("done", file=sys.stderr)


if __name__ == "__main__":
    with leaving():
        generate() if "--generate" in sys.argv else laws()
