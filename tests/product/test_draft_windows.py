"""Windows of drafters: which layers have one, and which tokens a slot of a block sees."""

import dataclasses
import itertools
import pathlib

import folders
import jax.numpy as jnp
import numpy as np
import published
import pytest
import toys
from exports import QWEN3_2
from window_layouts import FULL, LAYERS, LAYOUTS, SLIDING, USED

import specjax
from specjax.caches import BranchCache, KVCache
from specjax.files.headers import Stored
from specjax.methods import BlockDraftConfig
from specjax.methods.block.config import Fields, read_config


def stored(name):
    """The tensors of a fixture with three layers, by name, without a file."""
    shapes = dict(published.fixture(name)["tensors"])
    shapes |= {
        n.replace("layers.1.", "layers.2."): x for n, x in shapes.items() if "layers.1." in n
    }
    return {n: Stored(pathlib.Path("absent"), "F32", tuple(x), 0) for n, x in shapes.items()}


def read(name, layers, **fields):
    """The configuration of a fixture, read with other fields of its layers."""
    config = published.fixture(name)["config"]
    is_nested = "transformer_layer_config" in config
    inner = dict(config["transformer_layer_config"] if is_nested else config)
    for field in ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers"):
        inner.pop(field, None)
    inner |= {"num_hidden_layers": LAYERS, **layers}
    config = {**config, "transformer_layer_config": inner, **fields} if is_nested else inner
    return read_config(pathlib.Path("folder"), Fields(config), stored(name), 2, 1, 16)


@pytest.mark.parametrize("case", LAYOUTS)
def test_windows_are_those_of_the_layers(case):
    """In z-lab's layout, whatever model_type says, and in that of speculators."""
    fields, windows = LAYOUTS[case]
    wanted = windows if any(windows) else ()
    for label in ("qwen3", "qwen2", "llama"):
        assert read("dflash", {**fields, "model_type": label}).layers.windows == wanted
    made = read("speculators_dflash", fields)
    assert made.layers.windows == wanted
    assert made.anchored_windows == bool(wanted)


def test_causal_layers_are_those_with_windows():
    """In z-lab's layout those that are called so; in that of speculators none, if it says so."""
    both = {**USED, "layer_types": [SLIDING, FULL, SLIDING]}
    named = {**both, "use_sliding_window": False}
    assert read("dflash", both).causal == (True, False, True)
    assert read("dflash", {**USED, "max_window_layers": 1}).causal == (False, True, True)
    assert read("dflash", named).causal == (True, False, True)
    assert read("speculators_dflash", both).causal == (True, False, True)
    assert read("speculators_dflash", named).causal == ()
    assert read("speculators_dflash", both, sliding_window_non_causal=True).causal == ()
    fields = {"sliding_window_non_causal": None}
    assert read("speculators_dflash2", both, **fields).causal == ()


def test_speculators_reads_the_windows_of_llama_by_itself():
    """transformers' LlamaConfig keeps the fields without a meaning."""
    fields = {"model_type": "llama", "layer_types": [SLIDING, FULL, FULL], "sliding_window": 9}
    assert read("speculators_dflash", fields).layers.windows == (9, None, None)
    missing = {**fields, "sliding_window": None}
    assert read("speculators_dflash", missing).layers.windows == ()
    assert read("speculators_dflash", {**fields, "layer_types": None}).layers.windows == ()


WARNED = {
    "no use_sliding_window, without which transformers reads no window": {
        "layer_types": [SLIDING] * 3, "sliding_window": 9,
    },
    "windows of 3 tokens are smaller than its blocks of 5": {
        **USED, "sliding_window": 3, "layer_types": [SLIDING] * 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("message", WARNED)
def test_windows_that_two_packages_read_in_two_ways_give_a_warning(message):
    with pytest.warns(UserWarning, match=message):
        read("dflash", WARNED[message])


WRONG = {
    r'layer_types is \["full_attention"\]; it must be a list of 3 entries': {"layer_types": [FULL]},
    'max_window_layers is "1"': {**USED, "max_window_layers": "1"},
    "use_sliding_window is \"yes\"": {**USED, "use_sliding_window": "yes"},
    "sliding_window is 0": {**USED, "sliding_window": 0, "max_window_layers": 0},
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_windows_that_mean_nothing_are_refused(message):
    with pytest.raises(ValueError, match=message):
        read("dflash", WRONG[message])


# --- what a slot sees -----------------------------------------------------------------------------

BLOCK, TEXT, WINDOW = 4, 9, 3
STARTS = (7, 1, 5)


def naive(start, anchored, causal):
    """[S, T + S] bool: what each slot of a block sees of the text and of the block."""
    seen = np.zeros((BLOCK, TEXT + BLOCK), bool)
    for slot in range(BLOCK):
        at = start + slot
        for t in range(start):
            seen[slot, t] = start - t <= WINDOW if anchored else at - t < WINDOW
        for other in range(BLOCK):
            near = anchored or abs(slot - other) < WINDOW
            seen[slot, TEXT + other] = near and (other <= slot or not causal)
    return seen


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("anchored", [True, False])
def test_a_slot_sees_its_window(anchored, causal):
    """An anchored window ends before the anchor for every slot, and the block is seen without one;
    another moves with the slot.  So while a text is decoded, and in blocks that are trained side by
    side."""
    layers = QWEN3_2.__class__(**{**vars(QWEN3_2), "windows": (WINDOW, None)})
    flags = (causal, False) if causal else ()
    config = BlockDraftConfig(layers, 8, BLOCK, 0, flags, anchored)
    wanted = np.stack([naive(start, anchored, causal) for start in STARTS])
    for row, start in enumerate(STARTS):
        cache = KVCache.zeros(2, 1, 1, TEXT + BLOCK, 8, jnp.float32).commit(jnp.array([start]))
        memory = cache.layer(0)
        seen = np.asarray(config.visible(0, memory, cache.next_positions(BLOCK)))[0]
        np.testing.assert_array_equal(seen[:, :start], wanted[row][:, :start])
        np.testing.assert_array_equal(seen[:, start : start + BLOCK], wanted[row][:, TEXT:])
        assert not seen[:, start + BLOCK :].any()
        full = np.asarray(config.visible(1, memory, cache.next_positions(BLOCK)))[0]
        assert full[:, : start + BLOCK].all()
    leaves = jnp.array([STARTS])
    cache = BranchCache.text(1, TEXT)
    pair = (jnp.zeros((1, 1, TEXT, 8)),)
    cache = cache.__class__(pair, pair, cache.positions, cache.leaves, TEXT, TEXT)
    cache = cache.leaving(leaves, leaves[:, :, None] + jnp.arange(BLOCK))
    positions = cache.next_positions(BLOCK * len(STARTS))
    seen = np.asarray(config.visible(0, cache.layer(0), positions))[0]
    for row in range(len(STARTS)):
        own = slice(row * BLOCK, (row + 1) * BLOCK)
        block = TEXT + row * BLOCK
        np.testing.assert_array_equal(seen[own, :TEXT], wanted[row][:, :TEXT])
        np.testing.assert_array_equal(seen[own, block : block + BLOCK], wanted[row][:, TEXT:])
        others = np.delete(seen[own, TEXT:], np.arange(row * BLOCK, (row + 1) * BLOCK), axis=1)
        assert not others.any()


def test_anchored_windows_need_a_window():
    with pytest.raises(ValueError, match="anchored_windows=True, and no layer has a window"):
        BlockDraftConfig(QWEN3_2, 8, BLOCK, 0, (), True)


def test_later_passes_see_the_earlier_ones_of_their_branch():
    """A pass sees the text before its branch, earlier passes over the branch whole, and itself by
    the mask; a window counts from the positions of the branch."""
    leaves, width, passes = np.array([[7, 1, 5]]), 2, 3
    at = jnp.asarray(leaves[:, :, None] + np.arange(width))
    pair = (jnp.zeros((1, 1, TEXT, 8)), jnp.ones((1, 1, TEXT, 8)))
    cache = dataclasses.replace(BranchCache.text(1, TEXT), keys=pair, values=pair)
    cache = cache.leaving(jnp.asarray(leaves), at)
    for n in range(1, passes):
        cache = cache.go_on(at + n)
    own = width * leaves.size
    positions = np.asarray(cache.next_positions(own))
    np.testing.assert_array_equal(positions, np.asarray(at + passes - 1).reshape(1, -1))
    mask = np.array([[[False, True], [True, False]]])
    for inside, window in ((None, None), (mask, None), (mask, 4)):
        seen = np.asarray(cache.visible(cache.next_positions(own), inside, window))[0]
        assert seen.shape == (own, TEXT + passes * own)
        for token in range(own):
            branch, slot = divmod(token, width)
            for t in range(TEXT):
                near = window is None or positions[0, token] - t < window
                assert seen[token, t] == (near and t < leaves[0, branch])
            for n, other, place in np.ndindex(passes, leaves.size, width):
                column = TEXT + n * own + other * width + place
                allowed = place <= slot if inside is None else mask[0, slot, place]
                far = positions[0, token] - int(at[0, other, place] + n)
                wanted = other == branch and (n < passes - 1 or allowed)
                assert seen[token, column] == (wanted and (window is None or far < window))
    second = cache.layer(1)
    assert second.keys[0] is pair[1] and second.values[0] is pair[1]
    new = jnp.full((1, 1, own, 8), 2.0, jnp.bfloat16)
    for staged in second.stage(new, new):
        assert staged.dtype == jnp.float32 and (staged[:, :, :TEXT] == 1).all()
        assert staged.shape == (1, 1, TEXT + own, 8) and (staged[:, :, TEXT:] == 2).all()


@pytest.mark.parametrize("window", [1, 4, 40])
@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_a_draft_with_a_window_changes_no_text(window, rule):
    """Greedy texts are those of plain decoding under every exact rule, sampled ones under `match`;
    a window as long as the text drafts what the whole draft drafts."""
    target, draft = specjax.load(folders.target()), specjax.load(folders.draft())
    how = {"max_new_tokens": 24, "eos": []}
    for temperature in (0.0, 1.0) if rule == "match" else (0.0,):
        more = {**how, "temperature": temperature}
        plain = specjax.generate(target, "the cat sat", proposer="none", **more)
        drafted = [
            specjax.generate(
                target, "the cat sat", draft=draft, num_drafts=3, rule=rule, draft_window=w, **more
            )
            for w in (window, None)
        ]
        assert drafted[0].tokens == drafted[1].tokens == plain.tokens
        if window == 40:
            assert drafted[0].stats.accepted == drafted[1].stats.accepted


def test_a_draft_with_a_window_reads_no_further():
    """Its logits depend on the last tokens alone, and its cache is a ring of them."""
    draft = specjax.window_draft(specjax.load(folders.draft()), 3)
    layers = draft.model.module.config.num_layers
    tokens = np.arange(12, dtype=np.int32)[None] + 5
    other = tokens.copy()
    other[0, : 11 - 2 * layers] = 1
    read = [draft.model.apply(draft.params, x, np.arange(12)[None]).logits[0, -1]
            for x in (tokens, other)]  # fmt: skip
    np.testing.assert_array_equal(*read)
    assert draft.model.init_cache(1, 512).narrow(4, 16).keys[0].shape[2] < 64


def test_a_target_drafts_for_itself_in_a_window():
    """No array is kept twice, chains and trees are exact, and a window of the whole text accepts
    every draft."""
    target = specjax.load(folders.target())
    near, far = (specjax.window_draft(target, window) for window in (2, 200))
    assert near.params is target.params
    how = {"max_new_tokens": 24, "eos": [], "temperature": 1.0}
    plain = specjax.generate(target, "the cat sat", proposer="none", **how)
    shapes = ({"num_drafts": 3}, {"shape": specjax.StaticTree, "branching": (2, 2)})
    for draft, numbers in itertools.product((near, far), shapes):
        drafter = specjax.make_drafter(target, draft, **numbers)
        out = specjax.generate(target, "the cat sat", drafter=drafter, **how)
        assert out.tokens == plain.tokens
        assert draft is near or out.stats.acceptance_rate == 1.0


def test_a_window_is_checked():
    target, draft = specjax.load(folders.target()), specjax.load(folders.draft())
    for window, words in ((0, "draft_window=0"), (1.5, "draft_window=1.5"), ("2", "draft_window=")):
        with pytest.raises(ValueError, match=words):
            specjax.generate(target, "x", draft=draft, draft_window=window)
    with pytest.raises(ValueError, match="draft_window=4 is used with draft="):
        specjax.generate(target, "x", draft_window=4)
    with pytest.raises(ValueError, match="only a specjax Transformer"):
        specjax.window_draft(dataclasses.replace(draft, model=toys.TABLES.model()), 4)
