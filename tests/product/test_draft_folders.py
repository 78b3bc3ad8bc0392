"""Folders of drafters that lack a tensor, or are for another target: both are refused by name."""

import dataclasses
import functools
import pathlib
import re
import tempfile

import jax
import published
import published_target
import pytest
from exports import SOURCES, make
from heads import TINY, random_heads
from published_target import target, write_fixture
from removals import check_removals

import specjax
from specjax import LanguageModel, LinenModel, Transformer
from specjax.drafters.folder import open_drafter, recognised
from specjax.methods import FORMATS
from specjax.methods.medusa import folder as medusa
from specjax.methods.published.target_sizes import check_target
from specjax.parallel import RULES

_root = tempfile.TemporaryDirectory(prefix="specjax-tests-")

EXPORTED = [
    (name, layout)
    for name in SOURCES
    for format in FORMATS.values()
    if format.makes(make(name))
    for layout, known in format.layouts.items()
    if not known.faults(make(name), target())
]


@functools.cache
def exported(name, layout):
    folder = pathlib.Path(_root.name) / f"{name}-{layout}"
    specjax.save_drafter(folder, make(name), target(), layout)
    return folder


# Each folder is read many times, and says the same each time.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("name", published.NAMES)
def test_a_published_folder_names_the_tensor_that_it_lacks(name, tmp_path):
    folder = write_fixture(tmp_path, name)
    assert check_removals(folder, target()) > 20


@pytest.mark.parametrize(("name", "layout"), EXPORTED, ids=["-".join(x) for x in EXPORTED])
def test_a_written_folder_names_the_tensor_that_it_lacks(name, layout):
    assert check_removals(exported(name, layout), target()) > 12


@pytest.mark.parametrize("own", [True, False])
def test_heads_name_the_tensor_that_they_lack(own, tmp_path, monkeypatch):
    """Medusa's, of which a folder with one block has the fewest."""
    loaded = specjax.load(TINY)
    heads = random_heads(loaded, 0, num_layers=1, own_heads=own)
    specjax.save_medusa(tmp_path, heads, "tiny")
    _, config, tensors = open_drafter(tmp_path)
    for name in tensors:
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        assert recognised(tmp_path, config, rest) == "medusa"
        monkeypatch.setattr(medusa, "read_header", lambda path, rest=rest: rest.items())
        with pytest.raises(ValueError, match=rf"{re.escape(name)} is missing \(shape") as caught:
            specjax.load_drafter(tmp_path, loaded)
        assert str(caught.value).count("is missing") == 1


def test_a_label_says_what_is_missing(tmp_path):
    """P-EAGLE without its state, and EAGLE-3 without the norms that its configuration names."""
    folder = exported("eagle3, reduced", "speculators")
    _, config, tensors = open_drafter(folder)
    for name, fields in {
        "input_norm.weight": {"norm_before_fc": True},
        "fc_norm.0.weight": {"fc_norm": True},
    }.items():
        with pytest.raises(ValueError, match=rf"{re.escape(name)} is missing"):
            FORMATS["eagle3"].read(folder, {**config, **fields}, tensors, target(), RULES)
    for fields in ({"speculators_model_type": "peagle"}, {"architectures": ["PEagleSpeculator"]}):
        assert recognised(folder, {**config, **fields}, tensors) == "peagle"


# --- another target -------------------------------------------------------------------------------


@functools.cache
def other_target(**changes):
    """A target of other sizes, without weights."""
    config = dataclasses.replace(target().model.module.config, **changes)
    model = LinenModel(Transformer(config))
    params = jax.eval_shape(model.init, jax.random.key(0))
    return LanguageModel(model, params, name="other target")


SIZES = {
    "hidden_size": (8, 32),
    "vocab_size": (20, 40),
    "num_layers": (2, 6),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "layout"), EXPORTED, ids=["-".join(x) for x in EXPORTED])
def test_another_target_is_refused(name, layout, size):
    """By the name of what differs, on loading and by `specjax inspect --target`.

    A layout without `num_target_layers` does not say how many layers there are; then a target with
    fewer than it reads is refused.
    """
    folder = exported(name, layout)
    format, config, tensors = open_drafter(folder)
    for number in SIZES[size]:
        if size == "num_layers" and number > 4 and "num_target_layers" not in config:
            continue
        other = other_target(**{size: number})
        words = "pass (the target|a drafter)|other target uses"
        with pytest.raises(ValueError, match=words):
            FORMATS[format].read(folder, config, tensors, other, RULES)
        with pytest.raises(ValueError, match=words):
            FORMATS[format].describe(config, tensors, other)


PADDED = {
    # The target's vocabulary, the tokens that it uses, and the sizes that a drafter may state.
    (512, 505): (505, 510, 512, 514),
    (512, 512): (512, 520),
    (400, 400): (400, 404),
    (512, 300): (512,),
}
UNLIKE = {(512, 505): (504, 530), (512, 512): (511, 523), (400, 400): (300,), (512, 300): (300,)}


@pytest.mark.parametrize("sizes", PADDED)
def test_a_vocabulary_may_be_padded(sizes, tmp_path):
    """The same tokens are padded to various sizes, by a small part; other sizes are others."""

    class Words:
        def get_vocab(self):
            return {str(i): i for i in range(sizes[1])}

    loaded = dataclasses.replace(other_target(vocab_size=sizes[0]), tokenizer=Words())
    for stated in PADDED[sizes]:
        check_target(tmp_path, {}, {"vocab_size": stated}, loaded)
    for stated in UNLIKE[sizes]:
        with pytest.raises(ValueError, match=f"vocab_size is {stated}, and other target has"):
            check_target(tmp_path, {}, {"vocab_size": stated}, loaded)


def test_layers_that_are_spread_need_the_depth_they_were_spread_over(tmp_path):
    """Without ids they depend on the target, so another depth would read other layers."""
    folder = write_fixture(tmp_path, "dflash", dflash_config={"mask_token_id": 27})
    assert specjax.load_drafter(folder, target()).source.taps == (2, 2)
    other = published_target.target(layers=3)
    with pytest.raises(ValueError, match="num_target_layers is 4, and toy target has 3"):
        specjax.load_drafter(folder, other)


def test_heads_for_another_target_are_refused(tmp_path):
    """Medusa's: by the shapes of their tensors."""
    loaded = specjax.load(TINY)
    specjax.save_medusa(tmp_path, random_heads(loaded, 0, num_layers=1, own_heads=True), "tiny")
    for changes in ({"hidden_size": 32}, {"vocab_size": 40}):
        with pytest.raises(ValueError, match=r"(?s)other target.* has shape .* instead of"):
            specjax.load_drafter(tmp_path, other_target(**changes))
