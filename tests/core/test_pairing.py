"""Drafts with another tokenizer, from loading folders to the text."""

import dataclasses
import warnings

import folders
import language_models
import pytest
import tokenizers
from test_vocabulary import sentencepiece

import specjax
from specjax.cli import main
from specjax.methods.draft_model import drafter as pairing

pytestmark = pytest.mark.filterwarnings("ignore:the draft .* uses other tokens")

NEW = 40
PROMPTS = ["the cat", "on", "a hat, a dog and a rat of"]
SAID = "Z the cat sat.NUMBERS"
FEWER = tokenizers.Tokenizer.from_file(str(folders.tokenizer_file(270)))


def generate(target, prompts, **options):
    """`specjax.generate` without the measurements of the default, which `test_adaptive.py` has."""
    options.setdefault("proposer", "draft" if "draft" in options else "none")
    return specjax.generate(target, prompts, **options)


@pytest.fixture(scope="module")
def target():
    return language_models.target()


@pytest.fixture(scope="module")
def foreign():
    return language_models.foreign()


@pytest.fixture(scope="module")
def writer():
    """Writes SAID after Z, with 320 tokens."""
    return language_models.scribe(SAID, end=True)


@pytest.fixture(scope="module")
def twins():
    """The same writer in other tokens: fewer byte-level ones, and sentencepiece-style ones with
    another EOS."""
    return {
        "fewer": language_models.scribe(SAID, True, FEWER),
        "sentencepiece": language_models.scribe(SAID, True, sentencepiece(), 2),
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_targets_own(target, foreign, temperature):
    """Greedy and sampled texts of a ragged batch are those of plain decoding."""
    options = {"max_new_tokens": NEW, "temperature": temperature, "seed": 4}
    out = generate(target, PROMPTS, draft=foreign, num_drafts=2, **options)
    assert out.tokens == generate(target, PROMPTS, **options).tokens
    assert out.exact is True
    assert out.stats.acceptance_rate is not None


def test_a_draft_that_agrees_is_accepted(writer, twins):
    """All drafts are accepted where every token, also EOS, is shared; " sat" is lost where it
    takes three tokens.  Sampled texts are those of plain decoding, too."""
    sampled = {"max_new_tokens": NEW, "temperature": 1.2, "seed": 4}
    plain, other = (generate(writer, "Z", **how) for how in ({"max_new_tokens": NEW}, sampled))
    assert other.tokens != plain.tokens
    assert (plain.text, plain.finish) == ([SAID[1:]], ["eos"])
    alpha = {}
    for name, draft in twins.items():
        out = generate(writer, "Z", draft=draft, max_new_tokens=NEW)
        assert (out.tokens, out.finish) == (plain.tokens, plain.finish)
        alpha[name] = out.stats.acceptance_rate
        assert generate(writer, "Z", draft=draft, **sampled).tokens == other.tokens
    accepted = (
        len(plain.tokens[0]) - 2
    )  # two blocks of three end with the target's own token: " sat", and after four drafts
    assert alpha == {"sentencepiece": 1.0, "fewer": pytest.approx(accepted / (accepted + 1))}


def test_rejection(writer, twins):
    """A seed gives one text, and drafts are accepted and rejected."""
    options = {"temperature": 1.2, "rule": specjax.Rejection(), "max_new_tokens": NEW}
    options["num_drafts"] = 2
    one, two = (
        generate(writer, ["Z"] * 3, draft=twins["sentencepiece"], **options) for _ in range(2)
    )
    assert one.tokens == two.tokens
    assert 0 < one.stats.acceptance_rate < 1


def test_it_says_so_once(target, foreign):
    """The warning has names and numbers, and comes at the first use of a pair."""
    pairing._said.clear()
    with pytest.warns(
        UserWarning,
        match=r"draft 'foreign' \(270 tokens\) .* target 'target' \(290 tokens\).* the \d+ that",
    ) as warned:
        generate(target, PROMPTS, draft=foreign, num_drafts=2, max_new_tokens=NEW)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(target, PROMPTS, draft=foreign, num_drafts=2, max_new_tokens=NEW)
        specjax.make_drafter(target, target)  # no second warning
    for call in (
        lambda: generate(target, PROMPTS, draft=foreign, num_drafts=2, max_new_tokens=NEW),
        lambda: specjax.make_drafter(target, foreign),
    ):
        pairing._said.clear()
        with pytest.warns(UserWarning) as again:
            call()
        # The warning shows the user's line, whatever function of the library was called there.
        assert [w.filename for w in [*warned, *again]] == [__file__] * 2


def test_a_text_may_be_longer_than_the_draft_reads(target, foreign):
    """The draft has 40 positions, the text 60 tokens."""
    model = dataclasses.replace(foreign.model, max_positions=40)
    short = dataclasses.replace(foreign, model=model)
    out = generate(target, [[5] * 30], draft=short, num_drafts=2, max_new_tokens=30)
    assert out.tokens == generate(target, [[5] * 30], max_new_tokens=30).tokens


def words(**vocab):
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    made.decoder = tokenizers.decoders.ByteLevel()
    return made


WORDPIECE = tokenizers.Tokenizer(
    tokenizers.models.WordPiece({"[UNK]": 0, "the": 1}, unk_token="[UNK]")
)


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (
            words(a=0, b=1, zyzzyva=2),
            ["'foreign' (3 tokens) shares 2 tokens with the target", "at least 3"],
        ),
        (WORDPIECE, ["WordPiece", "neither byte-level nor sentencepiece-style"]),
        (None, ["'foreign' (280 ids, no tokenizer)", "'target' (290 tokens)"]),
    ],
)
def test_refused(target, foreign, tokenizer, message):
    """The error names both models, the numbers, and what to use instead."""
    with pytest.raises(ValueError) as caught:
        generate(target, "a", draft=dataclasses.replace(foreign, tokenizer=tokenizer))
    assert [part for part in [*message, "NGram()"] if part not in str(caught.value)] == []


def test_the_command_says_it_in_a_line(capsys, monkeypatch, target, twins):
    """`specjax generate` accepts such a draft and prints a readable warning."""
    pairing._said.clear()
    loaded = {"target": target, "draft": twins["sentencepiece"]}
    monkeypatch.setattr(specjax, "load", lambda folder, *_, **__: loaded[folder])
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        main(
            [
                "generate",
                "the cat",
                "--target",
                "target",
                "--draft",
                "draft",
                "--max-new-tokens",
                "8",
                "--num-drafts",
                "2",
                "--proposer",
                "draft",
            ]
        )
    printed = capsys.readouterr()
    assert (
        printed.err.startswith(f"specjax generate: the draft {loaded['draft'].name!r} (")
        and printed.err.count("\n") == 1
    )
    assert "same tokens                    yes" in printed.out
