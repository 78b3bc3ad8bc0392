"""Grammars: what `generate` writes under them, and what is refused before anything compiles."""

import dataclasses
import importlib.util
import json
import re

import constrained
import counted
import jsonschema
import numpy as np
import pytest
import table_pair
import test_vocabulary as vocabularies
from command_line import PAIR, TINY, failure, run
from test_constraint import Words

import bench.automata
import specjax
from specjax import Choice, Grammar, JSONSchema
from specjax.constraints import Matchers, automaton_of, matchers_of
from specjax.constraints.grammar import GrammarMatcher
from specjax.text import token_bytes

SUM, NEST, LIST = constrained.GRAMMARS
OPTIONS = {"max_new_tokens": 14, "temperature": 1.0, "seed": 5, "logprobs": 1}
CLOSING = [bytes([byte]) for byte in b'bd)]}"nul']
ASKED = [Grammar(NEST), None, Choice(["cat", "rat"]), Grammar(constrained.TREE, "")]
PROMPTS = ["the cat sat", "and the dog", "then the rat", "the"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path))


@pytest.fixture(scope="module")
def target():
    return table_pair.target()


@pytest.fixture(scope="module")
def plain(target):
    return specjax.generate(target, PROMPTS, constraint=ASKED, proposer="none", **OPTIONS)


def begun(target, grammar):
    made, _ = matchers_of(target, grammar, [list(target.eos)])
    return made[0]()


def judged(target, grammar, text, tokens, finish):
    """Is it a text of the grammar, or the beginning of one at the limit?"""
    ended = finish == "eos"
    assert constrained.begins(target, grammar, tokens[: len(tokens) - ended])
    return not ended or constrained.complete(grammar, text)


@pytest.mark.parametrize("size", [31, 32, 33, 64, 95])
def test_a_mask_has_the_tokens_of_the_vocabulary(size):
    """And not the EOS that llguidance has after them, nor what fills the last word."""

    class Everything:
        def deep_copy(self):
            return self

        def compute_bitmask(self):
            return np.full(size // 32 + 1, 2**32 - 1, np.uint32).tobytes()

    matcher = GrammarMatcher(Everything(), size, "everything")
    words = np.zeros(matcher.words, np.uint32)
    matcher.allowed(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert bits[:size].all() and not bits[size:].any()


def test_texts_fit_and_speculation_changes_none(target, plain):
    """Grammars beside an automaton and a free row; a lookup, and a stream."""
    for one, *made in zip(ASKED, plain.text, plain.tokens, plain.finish, strict=True):
        assert not isinstance(one, Grammar) or judged(target, one, *made)
    assert plain.text[2] in ("cat", "rat")
    assert all(np.isfinite(row.warped).all() for row in plain.logprobs)
    lookup = {"constraint": ASKED, "proposer": "ngram", "num_drafts": 3, **OPTIONS}
    assert specjax.generate(target, PROMPTS, **lookup).tokens == plain.tokens
    stream = specjax.generate(target, PROMPTS, stream=True, **lookup)
    pieces = np.array(list(stream))
    assert ["".join(column) for column in pieces.T] == plain.text


@pytest.mark.parametrize("grammar", [*constrained.GRAMMARS, constrained.TREE], ids=range(4))
def test_masks_say_what_may_follow(grammar, target):
    """Random walks over the masks: each allowed token can be pushed, and no other; a text that is
    complete is one; and a walk back leads to the same masks."""
    matcher, drawn = begun(target, Grammar(grammar)), np.random.default_rng(0)
    written = token_bytes(target.tokenizer, target.model.vocab_size)
    size, texts = target.model.vocab_size, 0
    for _ in range(12):
        seen, text = [], b""
        for _ in range(40):
            words = np.zeros(matcher.words, np.uint32)
            matcher.allowed(words)
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")
            assert not bits[size:].any()
            ways = np.flatnonzero(bits)
            others = np.setdiff1d(np.arange(size), ways)
            assert not any(matcher.push(int(token)) for token in drawn.choice(others, 5))
            if matcher.is_complete():
                texts += 1
                assert constrained.complete(Grammar(grammar), text.decode())
            if not ways.size:
                assert matcher.is_complete()
                break
            seen.append(words)
            # Closing tokens are preferred, because few walks would end otherwise.
            closing = [token for token in ways if written[token] in CLOSING]
            token = int(drawn.choice(closing or ways))
            assert written[token] and matcher.push(token)
            text += written[token]
        for before in reversed(seen):
            matcher.pop()
            words = np.zeros_like(before)
            matcher.allowed(words)
            assert (words == before).all()
    assert texts


def test_the_masks_of_a_tree(target):
    """Each node has the mask of its own path, EOS stands where a text is complete, and a draft that
    may not follow has a free mask."""
    token = {text: n for n, text in enumerate(token_bytes(target.tokenizer, 320)) if text}
    a, b, end = token[b"a"], token[b"b"], target.eos[0]
    accent = [token["é".encode()[n : n + 1]] for n in range(2)]
    matcher, words = begun(target, Grammar(NEST)), 10
    made = Matchers([matcher], np.array([[end, -1, -1, -1]]), words)
    #        root    a     é[0]  é[1]  b (after a: refused)   a  é[0]
    tokens = [0, a, accent[0], accent[1], b, a, accent[0]]
    parent = [-1, 0, 1, 2, 1, 1, 0]
    done = np.zeros(1, bool)
    masks = made.tree(made.roots(7, done), np.array([tokens]), np.array([parent]), done)[0]

    def may(node, token):
        return bool(masks[node, token // 32] >> np.uint32(token % 32) & 1)

    assert may(0, a) and not may(0, b) and not may(0, end)
    assert may(1, a) and may(2, accent[1]) and not may(2, a)
    assert may(3, b) and not may(3, end) and not may(3, a)
    assert (masks[4] == masks[4].max()).all() and may(4, end)
    assert may(5, a) and may(6, accent[1])
    made.observe(np.array([[*accent, end, 7]]), np.array([3]))
    assert matcher.is_complete()


def test_a_matcher_leaves_a_draft_that_leads_nowhere():
    """Here the vocabulary has no `#`."""
    words = Words(vocabularies.TOKENIZERS["unigram"]())
    made, _ = matchers_of(words, Grammar('start: "t" "#" | "a" "t"'), [[0]])
    matcher, written = made[0](), token_bytes(words.tokenizer, words.model.vocab_size)
    t, a = written.index(b"t"), written.index(b"a")
    masks = Matchers([matcher], np.array([[0]]), matcher.words)
    done, parent = np.zeros(1, bool), np.array([[-1, 0, 0]])
    first = masks.tree(masks.roots(3, done), np.array([[0, t, a]]), parent, done)[0]
    assert (first[1] == first[1].max()).all() and first[2].any() and first[2].max() < first[1].max()
    masks.observe(np.array([[t]]), np.array([1]))
    with pytest.raises(ValueError, match="nothing may follow the text of prompt 0 under Grammar"):
        masks.roots(3, done)


REFUSED = {
    "unknown name": (Grammar("start: expr\n"), ["line 1, column 8", 'unknown name: "expr"']),
    "line": (Grammar('start: "a"\nfoo bar\n'), ["line 2", "correct it"]),
    "expression": (Grammar("start: A\nA: /[/\n"), ["line 2", "invalid regex"]),
    "no start": (Grammar('x: "a"'), ["start"]),
    "GBNF": (Grammar('root ::= "(" root ")\n'), ["not a grammar in GBNF", "line 2"]),
    "empty text": (Grammar('start: ""'), ["only the empty text"]),
    "no text": (Grammar('start: start "a"'), ["matches no text"]),
    "keyword": (Grammar({"type": "array", "uniqueItems": True}), ["uniqueItems"]),
    "too many": ([Grammar(NEST), None], ["constraint has 2 values for 1 prompts"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_grammars_are_refused(case, target):
    constraint, words = REFUSED[case]
    before = counted.compilations()
    with pytest.raises(ValueError) as error:
        specjax.generate(target, "the cat", constraint=constraint)
    assert all(word in str(error.value) for word in words), error.value
    assert counted.compilations() == before


def test_where_grammars_are_refused(target, monkeypatch):
    def refused(words, *arguments, **options):
        before = counted.compilations()
        with pytest.raises(ValueError, match=words):
            specjax.generate(*arguments, **options)
        assert counted.compilations() == before

    grammar = Grammar(NEST)
    mesh = specjax.make_mesh()
    refused("draft_mesh= drafts while", target, "the", constraint=grammar, draft_mesh=mesh)
    refused("needs a token that ends", target, "the", constraint=grammar, eos=[])
    wordless = dataclasses.replace(target, tokenizer=None)
    refused("needs a tokenizer", wordless, [[1, 2]], constraint=grammar)
    with pytest.raises(ValueError, match="on the host, which an engine"):
        automaton_of(target, grammar)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused(r"needs llguidance: pip install -e .*\[grammar\]", target, "the", constraint=grammar)


@pytest.mark.parametrize("text", ["", "  ", 3, None, ["a"]])
def test_what_is_no_grammar(text):
    with pytest.raises(ValueError, match="Grammar"):
        Grammar(text)


@pytest.mark.parametrize("text", ["{", '{"a": NaN}', {"a": {1}}])
def test_what_is_no_schema(text):
    with pytest.raises(ValueError, match=r"Grammar\(.*no schema"):
        Grammar(text)


def test_a_recursive_schema_names_the_cure(target):
    with pytest.raises(ValueError, match=r"leads to itself.*specjax\.Grammar"):
        automaton_of(target, JSONSchema({"$defs": {"x": {"type": "array", "items": {
            "$ref": "#/$defs/x"}}}, "$ref": "#/$defs/x"}))  # fmt: skip


def test_the_command_line(capsys, tmp_path, monkeypatch):
    table_pair.stand_in(monkeypatch, TINY)
    schema, grammar = tmp_path / "tree.json", tmp_path / "sum.lark"
    schema.write_text(json.dumps(constrained.TREE))
    made = run(capsys, "generate", "x = ", *PAIR[:2], "--grammar", schema, "--max-new-tokens", 12,
               "--proposer", "none", "--no-compare").out  # fmt: skip
    assert made.removeprefix("x = ").startswith("{"), made
    grammar.write_text("start: (")
    assert "sum.lark" in failure(capsys, "generate", "x", *PAIR, "--grammar", tmp_path / "no.lark"
                                 ).replace("no.lark", "sum.lark")  # fmt: skip
    told = failure(capsys, "generate", "x", *PAIR, "--grammar", grammar)
    assert "line 1" in told
    assert "--canonical is used with" in failure(
        capsys, "generate", "x", *PAIR, "--grammar", grammar, "--canonical"
    )
    jsonschema.Draft202012Validator.check_schema(constrained.TREE)


def test_the_benchmark_of_sizes(capsys):
    bench.automata.main(["--sizes", "4096"])
    printed = capsys.readouterr().out
    for name in bench.automata.SCHEMAS:
        row = re.search(rf"^\| {re.escape(name)} \| (\d+) x (\d+), ", printed, re.MULTILINE)
        assert row and int(row[1]) > 1 and int(row[2]) > 1, printed
    assert all(f"| {name} | " in printed for name in bench.automata.GRAMMARS)
