"""P-EAGLE heads draft what a NumPy reference drafts, which reads everything again in each step."""

import eagle3_folders
import eagle3_reference
import jax
import numpy as np
import pytest
from eagle3_cases import LENGTHS, Most, prompts, target, texts

import specjax
from specjax import ChoiceTree, Decoder, Params, Sampling

MASK = {"speculators": 11, "SpecForge": 319}
DEPTH = {"speculators": 3, "SpecForge": 8}


@pytest.mark.parametrize("layout", eagle3_folders.PARALLEL)
def test_drafts_are_those_of_the_reference(layout):
    """Over several blocks, in which drafts are accepted and rejected."""
    folder, reference = eagle3_reference.parallel(layout)
    loaded = target("llama")
    made = specjax.load_drafter(folder, loaded)
    assert made.proposer == ChoiceTree(made.source)
    depth = made.proposer.max_depth
    assert depth == DEPTH[layout]
    arrays = Params(loaded.params, made.arrays(loaded))
    dec = Decoder(loaded.model, made.proposer, Most(), (), 96)
    state = dec.prefill(
        arrays,
        prompts(),
        LENGTHS,
        limit=np.full(len(LENGTHS), 96, np.int32),
        sampling=Sampling.create(len(LENGTHS), 0.0),
        key=jax.random.split(specjax.make_key(0), len(LENGTHS)),
    )
    step, accepted = jax.jit(dec.step), []
    for _ in range(5):
        before = texts(state)
        state, info = step(arrays, state)
        drafts = np.asarray(info.proposal.tokens)[:, 1:].tolist()
        assert drafts == [
            reference.block(text, MASK[layout], depth).argmax(-1).tolist() for text in before
        ]
        accepted += info.num_accepted.tolist()
    assert min(accepted) < 3 <= max(accepted), accepted


def test_generate_writes_what_plain_decoding_writes():
    """As a chain, and as a tree of the best tokens of every depth."""
    loaded, asked = target("llama"), [prompts(2)[0].tolist(), [5, 6]]
    folder, _ = eagle3_reference.parallel("speculators")
    choices = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
    for shape in ({}, {"shape": ChoiceTree, "choices": choices}):
        made = specjax.load_drafter(folder, loaded, **shape)
        for temperature in (0.0, 1.0):
            settings = {"max_new_tokens": 24, "temperature": temperature, "seed": 3, "eos": []}
            out = specjax.generate(loaded, asked, drafter=made, **settings)
            assert out.tokens == specjax.generate(loaded, asked, **settings).tokens
            assert out.stats.acceptance_rate is not None and out.exact


def test_what_does_not_fit_is_refused(tmp_path):
    head, config = eagle3_folders.PARALLEL["SpecForge"]
    good, tensors = config(head), head.tensors(2)
    cases = [
        ({"mask_token_id": None}, {}, r"mask_token_id is null.*options of the training run"),
        ({"mask_token_id": 320}, {}, r"mask_token_id is 320.*\[0, 319\]"),
        (
            {"norm_output": True},
            {},
            "norm_output is true; it must be missing, since a P-EAGLE head",
        ),
        (
            {},
            {"mask_hidden": tensors["mask_hidden"][..., :7]},
            r"mask_hidden has shape \[1, 1, 7\]",
        ),
    ]
    for number, (fields, changed, message) in enumerate(cases):
        folder = tmp_path / str(number)
        eagle3_folders.write(folder, {**good, **fields}, {**tensors, **changed})
        with pytest.raises(ValueError, match=message):
            specjax.load_drafter(folder, target("llama"))
