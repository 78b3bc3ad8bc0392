"""Datastores: sorting, looking up, the distribution of the votes, folders, and what is refused."""

import functools
import json
import pathlib

import counted
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from command_line import TINY, failure, run
from toys import TABLES as toys
from votes import agreed, contexts, mixed

import specjax
from specjax import Datastore, load_datastore, save_datastore
from specjax.contract import Lookahead
from specjax.methods import DEPTH, DatastoreParams, DatastoreSource
from specjax.methods.datastore import lookup
from specjax.methods.datastore.sorting import SEPARATORS, sort_places
from specjax.types import Block

VOCAB = 6


@functools.cache
def target():
    return specjax.load(TINY / "target")


def corpus(rng, texts=5, most=60, vocab=VOCAB):
    return [rng.integers(0, vocab, rng.integers(1, most)).tolist() for _ in range(texts)]


def padded(context):
    return np.array((*context, *[lookup.NONE] * DEPTH)[:DEPTH], np.int32)


@pytest.mark.parametrize("vocab", [VOCAB, 70_000])
def test_places_are_sorted_by_their_contexts(vocab):
    """Every position with a token at and before it is a place, by the tokens before it."""
    texts = [*corpus(np.random.default_rng(1), vocab=vocab), [3], [4, 4, 4], [4, 4]]
    store = Datastore.build(texts, vocab_size=vocab)
    tokens = np.asarray(store.tokens, np.int64)
    assert store.tokens.dtype == (np.uint16 if vocab == VOCAB else np.uint32)
    assert len(store.order) == len(contexts(texts))
    before = [tuple(tokens[DEPTH + at - DEPTH : DEPTH + at][::-1]) for at in store.order]
    assert before == sorted(before)
    known = [
        (before[:1], int(tokens[DEPTH + at]))
        for before, at in zip(before, store.order, strict=True)
    ]
    assert sorted(known) == sorted((context[:1], token) for context, token in contexts(texts))
    for token in range(min(vocab, 20)):
        first, end = store.starts[token : token + 2]
        assert all(context[0] == token for context in before[first:end])
    assert store.starts[-1] == len(store.order)


@pytest.mark.parametrize("size", [40, 4000])
def test_the_ranges_are_those_of_a_scan(size):
    """For every context, drawn from the corpus or not, the search finds what a scan finds."""
    rng = np.random.default_rng(size)
    texts, base = corpus(rng, size // 20), rng.integers(0, VOCAB, 30)
    # Texts that differ in one token, which some contexts have far back.
    texts += [np.where(np.arange(30) == at, 5 - base, base).tolist() for at in (5, 11, 14, 20)]
    store = Datastore.build(texts, vocab_size=VOCAB)
    arrays, places = store.arrays(), contexts(texts)
    find = jax.jit(lookup._ranges)
    drawn = [
        places[rng.integers(len(places))][0] if index % 2 else tuple(rng.integers(0, 6, 9))
        for index in range(40)
    ]
    # These two contexts differ only in the last token by which positions are sorted.
    drawn += [tuple(text[11 : 11 + DEPTH][::-1]) for text in texts[-4:-2]]
    for some in drawn:
        low, high, at = map(np.asarray, find(arrays, padded(some)))
        for n in range(1, lookup._SHORT + 1):
            wanted = (
                sum(agreed(context, some) >= n for context, _ in places) if len(some) >= n else 0
            )
            assert high[n - 1] - low[n - 1] == wanted
        tokens = np.asarray(store.tokens, np.int64)
        before = [tuple(tokens[at : DEPTH + at][::-1]) for at in store.order]
        assert at == sum(context < tuple(padded(some).tolist()) for context in before)


def test_the_window_is_around_the_context():
    """Of more places than it holds that begin alike, those next to where the context belongs."""
    rng = np.random.default_rng(5)
    texts = corpus(rng, 60)
    store, places = Datastore.build(texts, vocab_size=VOCAB), contexts(texts)
    arrays, tokens = store.arrays(), np.asarray(store.tokens, np.int64)
    look = jax.jit(lambda some: (*(found := lookup._ranges(arrays, some)), *lookup._places(
        arrays, some, *found[:2], jnp.minimum(found[1] - found[0], lookup._SAMPLE), found[2]
    )))  # fmt: skip
    seen = set()
    for _ in range(40):
        some = padded(places[rng.integers(len(places))][0])
        low, high, at, short, near, agree = map(np.asarray, look(some))
        first = max(min(at - 32, high[0] - 64), low[0])
        seen.add((first == at - 32, first == low[0], first == high[0] - 64))
        for index, token, same in zip(range(first, first + 64), near, agree, strict=True):
            place = DEPTH + int(store.order[min(index, len(store.order) - 1)])
            assert token == tokens[place]
            before = tokens[place - 1 : place - 9 : -1].tolist()
            assert same == (agreed(before, some[:8].tolist()) if index < high[0] else 0)
        for n in range(lookup._SHORT):
            count = min(high[n] - low[n], 128)
            spread = [low[n] + (high[n] - low[n]) * part // count for part in range(count)]
            assert short[n, :count].tolist() == tokens[store.order[spread] + DEPTH].tolist()
    assert np.any(list(seen), axis=0).all()


@pytest.mark.parametrize(("seed", "apart"), [*((seed, 1) for seed in range(6)), (5, 128)])
def test_votes_are_mixed_as_documented(seed, apart):
    """A naive count over all places gives the same distribution, with the own text and without;
    tokens `apart` from each other, fewer than the table for counting has entries, are distinct."""
    rng = np.random.default_rng(seed)
    texts = [(apart * np.array(text)).tolist() for text in corpus(rng, 4, 50)]
    # A window sees all that agree.
    arrays = Datastore.build(texts, vocab_size=apart * VOCAB).arrays()
    prior = np.asarray(arrays.prior, np.float64)
    np.testing.assert_allclose(prior.sum(), 1, atol=1e-6)
    own = (apart * rng.integers(0, VOCAB, 14)).tolist() if seed % 2 else [3, 1]
    text = np.zeros(20, np.int32)
    text[: len(own)] = own
    known = max(texts, key=len)
    short = [2 * apart], [0, 5 * apart, apart]
    for drafts in ([], *short, known[8:4:-1], known[12:4:-1]):  # the newest token first
        some = (*drafts, *own[::-1])
        made = jax.jit(lookup.look_up)(arrays, padded(some), text, np.int32(len(own)))
        places = [(c, t) for c, t in contexts([own]) if c]
        wanted = mixed(contexts(texts), places, some, prior)
        np.testing.assert_allclose(np.exp(made), wanted, rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(np.exp(made).sum(), 1, rtol=1e-4)


def test_a_document_ends_a_context():
    """Own places neither agree across the end of a document nor continue behind it."""
    text = np.array([-1, -1, 4, 5, 2, -1, 4, 5, 0, 0], np.int32)  # a document, then the text "4 5"
    arrays = Datastore.build([[1, 1]], vocab_size=VOCAB).arrays()
    own, agree = lookup._own_places(jnp.array(padded((5, 4, lookup.NONE))), text, jnp.int32(8))
    assert (own[0], agree[0]) == (2, 2) and (agree[1:] == 0).all()
    own, agree = lookup._own_places(jnp.array(padded((2, 5, 4))), text, jnp.int32(8))
    assert (agree == 0).all(), "nothing follows the end of a document"
    assert isinstance(arrays, DatastoreParams)


def test_another_datastore_of_equal_capacity_is_no_other_program():
    """Swapped and grown datastores reuse the program, and their drafts differ."""
    model, texts = toys.model(), toys.greedy_texts()
    one = Datastore.build(texts[:2].tolist(), vocab_size=toys.VOCAB, capacity=512)
    other = Datastore.build(
        np.random.default_rng(0).integers(0, toys.VOCAB, (2, 60)).tolist(),
        vocab_size=toys.VOCAB, capacity=512,
    )  # fmt: skip
    grown = other.extended(texts[:4].tolist())
    assert grown.capacity == 512 and grown.size > other.size
    decoder = specjax.Decoder(
        model, specjax.DatastoreLookup(toys.VOCAB, 3), specjax.Match(), (), toys.CAPACITY
    )
    accepted = []
    for store in (one, other, grown):
        params = specjax.Params(toys.weights(), store.arrays())
        before = len(counted.traces())
        state = decoder.run(params, toys.prefill(decoder, params))
        accepted.append(int(state.stats.accepted.sum()))
        assert store is one or counted.traces(before) == []
    assert accepted[1] < accepted[0] and accepted[1] < accepted[2]


def test_a_folder_round_trip(tmp_path):
    """The saved arrays are mapped from the file, and a larger capacity can be asked for."""
    store = Datastore.build(["the cat sat on the mat", "the cat"], target(), capacity=99)
    save_datastore(tmp_path / "store", store)
    loaded = load_datastore(tmp_path / "store")
    assert isinstance(loaded.tokens, np.memmap) and loaded.capacity == 99
    for name in ("tokens", "order", "starts"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(store, name))
    assert loaded.drafter(target()).proposer == store.drafter(target()).proposer
    assert load_datastore(tmp_path / "store", capacity=400).capacity == 400
    with pytest.raises(ValueError, match="capacity=3"):
        load_datastore(tmp_path / "store", capacity=3)


def damage_bytes(folder):
    file = folder / "datastore.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)


def describe(**changes):
    def change(folder):
        file = folder / "datastore.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def other_arrays(folder):
    """A whole file with a fitting hash, of other arrays."""
    import hashlib

    file = folder / "datastore.safetensors"
    safetensors.numpy.save_file({"tokens": np.zeros(9, np.uint16)}, file)
    describe(sha256=hashlib.sha256(file.read_bytes()).hexdigest())(folder)


DAMAGE = {
    "a flipped bit": (damage_bytes, "SHA-256"),
    "cut": (lambda f: (f / "datastore.safetensors").write_bytes(b"12"), "SHA-256"),
    "no description": (lambda f: (f / "datastore.json").unlink(), "specjax datastore build"),
    "no arrays": (lambda f: (f / "datastore.safetensors").unlink(), "datastore.safetensors"),
    "not JSON": (lambda f: (f / "datastore.json").write_text("{"), "not JSON"),
    "another format": (describe(format="x"), 'format is "x"'),
    "no tokens": (describe(tokens=0), "tokens is 0"),
    "more tokens": (describe(tokens=10**6), "does not fit"),
    "other arrays": (other_arrays, "lacks .order."),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_folders_are_refused(tmp_path, what):
    """The error names the file, and says to build it again."""
    save_datastore(tmp_path, Datastore.build(["the cat sat"], target()))
    harm, words = DAMAGE[what]
    harm(tmp_path)
    with pytest.raises((ValueError, OSError), match=words) as caught:
        load_datastore(tmp_path)
    assert str(tmp_path) in str(caught.value)


def big(tokens):
    """A corpus of so many tokens, of which none is read."""

    class Huge(np.ndarray):
        def __len__(self):
            return tokens

    return np.zeros(1, np.int64).view(Huge)


REFUSED = {
    "empty": (lambda: Datastore.build([], target()), ["would be empty", "at least one text"]),
    "empty texts": (lambda: Datastore.build(["", ""], target()), ["all 2 texts are empty"]),
    "no list": (lambda: Datastore.build("abc", target()), ["texts='abc'", "pass a list"]),
    "no tokenizer": (lambda: Datastore.build(["a"], vocab_size=5), ["texts need a tokenizer"]),
    "no vocabulary": (lambda: Datastore.build([[1]]), ["vocab_size="]),
    "a great token": (lambda: Datastore.build([[1, 9]], vocab_size=5), ["text 0", "1 to 9", "5"]),
    "a number": (lambda: Datastore.build([5], vocab_size=5), ["text 0 is 5", "lists of token ids"]),
    "a fraction": (lambda: Datastore.build([[1.5]], vocab_size=5), ["text 0", "[1.5]"]),
    "capacity": (
        lambda: Datastore.build([[1, 2, 3, 4]], vocab_size=5, capacity=4),
        ["5 tokens", "capacity=4", "raise the capacity"],
    ),
    "predicted": (
        lambda: Datastore.build([[1] * 100], vocab_size=5, capacity=4),
        ["about 101 tokens", "capacity=4", "raise the capacity"],
    ),
    "capacity of 0": (lambda: Datastore.build([[1]], vocab_size=5, capacity=0), ["capacity=0"]),
    "memory": (
        lambda: Datastore.build([big(10**14)], vocab_size=5),
        ["about 100,000,000,000,001 tokens", "free"],
    ),
    "more tokens than the target": (
        lambda: Datastore.build([[1, 2]], vocab_size=10**6).drafter(target()),
        ["999999", "tokenizer of this target"],
    ),
    "share": (lambda: specjax.DatastoreSource(5, 1.0), ["min_share=1.0", "probability"]),
    "by name": (
        lambda: specjax.generate(target(), "a", proposer="datastore"),
        ["load_datastore(folder).drafter(target)"],
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what):
    """Before anything is compiled, with the value and the cure."""
    make, parts = REFUSED[what]
    with pytest.raises(ValueError) as caught:
        make()
    assert [part for part in parts if part not in str(caught.value)] == []


def test_a_datastore_of_another_tokenizer_is_refused(tmp_path):
    other = specjax.load(pathlib.Path(TINY).parent / "pycode" / "target")
    store = Datastore.build(["the cat"], target(), name="ours")
    with pytest.raises(ValueError, match="ours was built with another tokenizer"):
        store.drafter(other)
    with pytest.raises(ValueError, match="another tokenizer"):
        store.extended(["the dog"], other)


def test_separators_are_greater_than_tokens():
    assert all(sep > 0 for sep in SEPARATORS.values())
    for dtype, separator in SEPARATORS.items():
        tokens = np.full(DEPTH + 2, separator, dtype)
        order, starts = sort_places(tokens, 3)
        assert len(order) == 0 and (starts == 0).all()


def test_files_of_text_and_of_tokens(tmp_path):
    """Text files, NumPy arrays and raw token ids give the places of their texts."""
    ids = target().tokenizer.encode("the cat sat").ids
    (tmp_path / "a.txt").write_text("the cat sat")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\0")
    np.save(tmp_path / "c.npy", np.array(ids))
    np.array(ids, np.uint16).tofile(tmp_path / "d.bin")
    stores = [
        Datastore.build([part], target())
        for part in ("the cat sat", ids, *(tmp_path / f"{n}" for n in ("a.txt", "c.npy", "d.bin")))
    ]
    for store in stores:
        np.testing.assert_array_equal(store.tokens, stores[0].tokens)
    with pytest.raises(ValueError, match="no UTF-8 text"):
        Datastore.build([tmp_path / "b.txt"], target())


def test_the_command(tmp_path, capsys):
    """`build` predicts the size, `info` describes, and `generate` uses the datastore."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("the cat sat on the mat. " * 9)
    (tmp_path / "texts" / "b.py").write_text("import os")
    out = tmp_path / "store"
    build = ["datastore", "build", tmp_path / "texts", "--tokenizer", TINY / "target"]
    said = run(capsys, *build, "--out", out, "--pattern", "*.txt", "--json")
    facts = json.loads(said.out)
    assert "1 files, about" in said.err and facts["bytes_per_token"] == 6
    again = json.loads(run(capsys, "datastore", "info", out, "--json").out)
    assert again == facts
    assert f"{facts['tokens']:,}" in run(capsys, "datastore", "info", out).out
    use = ["generate", "the cat", "--target", TINY / "target", "--max-new-tokens", 8, "--json"]
    made = run(capsys, *use, "--proposer", "datastore", "--drafter", out, "--branching", 2, 1)
    assert json.loads(made.out)["stats"]["same_tokens"]
    assert "needs --drafter" in failure(capsys, *use, "--proposer", "datastore")
    assert "does not exist" in failure(capsys, *build[:2], tmp_path / "x", *build[3:], "--out", out)
    assert "matches '*.md'" in failure(capsys, *build, "--out", out, "--pattern", "*.md")
    pycode = TINY.parent / "pycode" / "target"
    told = failure(capsys, "datastore", "info", out, "--tokenizer", pycode)
    assert "another tokenizer" in told


def test_the_own_text_has_room_for_a_step():
    """A step writes all of its tokens behind the text, those beyond the capacity included."""
    arrays = Datastore.build([[1, 2, 1]], vocab_size=VOCAB).arrays()
    tokens = np.ones((2, 5), np.int32)
    prompt = Block(tokens, tokens[..., None].astype(np.float32), np.array([5, 3]))
    state = DatastoreSource(VOCAB).init(arrays, prompt, 9, Lookahead(3, 4, True))
    assert state.tokens.shape == (2, 9 + 3 + 1)
