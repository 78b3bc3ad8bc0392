"""The request behind `generate`: one record, and users' other words for it."""

import dataclasses
import inspect
import sys

import folders
import language_models
import pytest
from preparing import prepared

import specjax
from specjax._internal.jit_cache import Recent
from specjax.cli import main
from specjax.generation import prepare
from specjax.generation.request import OTHER_WORDS, Options, Request, make_request


@pytest.fixture(scope="module")
def target():
    return language_models.target()


@pytest.fixture(scope="module")
def draft():
    return language_models.draft()


def test_the_keywords_of_generate_are_the_fields_of_a_request():
    """For a type checker, for `help`, and in fact."""
    fields = {field.name: field for field in dataclasses.fields(Request)}
    assert list(Options.__annotations__) == [name for name in fields if name != "prompts"]
    for name, kind in Options.__annotations__.items():
        assert getattr(kind, "__forward_arg__", kind) == fields[name].type, name
    shown = inspect.signature(specjax.generate).parameters
    assert set(shown) == {"target", "stream", "mesh", "draft_mesh", *fields}
    assert all(shown[name].default == field.default for name, field in fields.items())
    documented = Request.__doc__
    assert [name for name in fields if name not in documented] == []


@pytest.mark.parametrize("name", OTHER_WORDS)
def test_the_words_of_other_libraries_are_answered_with_ours(name):
    with pytest.raises(ValueError, match=rf"^{name}= is not used here: pass "):
        make_request("x", {name: 1})


def test_a_typing_error_is_answered_with_the_nearest_word():
    with pytest.raises(ValueError, match="did you mean temperature="):
        make_request("x", {"temprature": 1})


SAME = [
    ({"proposer": "ngram"}, {"proposer": specjax.NGram()}),
    ({"proposer": "ngram", "num_drafts": 6}, {"proposer": specjax.NGram(6), "num_drafts": 6}),
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 6}},
     {"proposer": specjax.NGram(6), "num_drafts": 6}),
    ({"speculative_config": {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}},
     {"proposer": specjax.NGram(4, 3, 1), "num_drafts": 4}),
    ({"rule": "rejection"}, {"rule": specjax.Rejection()}),
    ({"proposer": "none"}, {"proposer": specjax.NoProposer()}),
    ({"proposer": "auto"}, {}),
    ({"rule": "rejection"}, {"rule": "rejection", "proposer": "none"}),
]  # fmt: skip


@pytest.mark.parametrize(("said", "meant"), SAME)
def test_strings_mean_what_they_name(target, said, meant):
    """The same program and the same numbers as with objects."""
    one, other = (prepared(target, "the cat", **options) for options in (said, meant))
    assert one.decoder == other.decoder
    assert (one.num_drafts is None) == (other.num_drafts is None)
    if one.num_drafts is not None:
        assert one.num_drafts.tolist() == other.num_drafts.tolist()


def test_a_draft_is_a_model_a_folder_or_a_config(target):
    """All of them make a chain of as many drafts."""
    draft = specjax.load(folders.draft())
    calls = [
        prepared(target, "the cat", draft=draft, num_drafts=3),
        prepared(target, "the cat", draft=str(folders.draft()), num_drafts=3),
        prepared(target, "the cat", drafter=specjax.make_drafter(target, draft, num_drafts=3)),
        prepared(
            target,
            "the cat",
            speculative_config={"model": str(folders.draft()), "num_speculative_tokens": 3},
        ),
    ]
    assert len({call.decoder for call in calls}) == 1
    assert calls[0].decoder.proposer.max_depth == 3


@pytest.mark.parametrize("name", ["tree", "dynamic-tree", "first-of", "draft"])
def test_a_name_takes_the_draft(target, draft, name):
    proposer = prepared(target, "the cat", proposer=name, draft=draft).decoder.proposer
    assert proposer.asks_draft
    with pytest.raises(ValueError, match=f"proposer='{name}' needs a draft model: pass draft= too"):
        prepared(target, "the cat", proposer=name)


REFUSED = {
    "no proposer": ({"proposer": "prompt lookup"}, "pass one of auto, datastore, draft"),
    "no rule": ({"rule": "lossy"}, "pass one of match, rejection"),
    "no method": ({"speculative_config": {"method": "telepathy"}}, "it takes ngram, draft_model"),
    "a method without its model": ({"speculative_config": {"method": "medusa"}}, 'needs a "model"'),
    "an unknown key": ({"speculative_config": {"methode": "ngram"}}, "has the key 'methode'"),
    "said twice": (
        {"speculative_config": {"method": "ngram"}, "num_drafts": 3},
        "say the same thing: leave one of them out",
    ),
    "no drafter": ({"drafter": specjax.NGram()}, "drafter=<a NGram>; pass what a loader"),
    "heads by name": ({"proposer": "medusa"}, "comes without its weights"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(target, case):
    options, words = REFUSED[case]
    with pytest.raises(ValueError) as caught:
        prepared(target, "the cat", **options)
    assert words in str(caught.value)


def test_a_request_is_checked_as_a_call(target):
    """What an engine will do: the record itself, without `generate`."""
    call = prepare(target, Request(prompts=["the cat", "on"], max_new_tokens=3, seed=[1, 2]))
    assert call.new == 3 and call.seeds[0].tolist() == [1, 2]


def test_a_model_prints_a_line(target):
    line = repr(target)
    assert "\n" not in line and len(line) < 200
    assert target.name in line and "float32" in line


def test_an_output_prints_its_text_and_its_figures(target, draft, monkeypatch):
    """Compilation is apart: a second call of a kind has none."""
    # Another test of this process may have made the same call.
    monkeypatch.setattr(sys.modules["specjax.generation.warmup"], "_compiled", Recent())
    first, second = (
        specjax.generate(target, "the cat", proposer="draft", draft=draft, max_new_tokens=9)
        for _ in range(2)
    )
    assert first.tokens == second.tokens
    assert first.stats.compile_seconds > 0 == second.stats.compile_seconds
    shown = str(second)
    assert second.text[0] in shown
    assert [word for word in ("tokens/s", "tau", "lossless") if word not in shown] == []
    assert second.stats.tokens_per_pass == second.stats.mean_accepted_length


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"specjax {specjax.__version__}\n"
