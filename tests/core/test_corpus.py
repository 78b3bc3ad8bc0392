"""Text files become token streams, batches and masks."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import trained
from toys import TABLES as toys

from specjax.models.transformer import head_matrix
from specjax.training.corpus import (
    Source,
    Tokens,
    read_documents,
    starts_of_documents,
    where_to_cut,
)
from specjax.training.student import isolate, read
from specjax.training.tokenising import prepare


def test_batches_depend_on_the_step_alone(tmp_path):
    """A batch depends on its step only, not on the order of calls; an epoch covers the stream.

    The order is that of NumPy's permutations, so that a run of an earlier version can be resumed.
    """
    ids = np.arange(1000, dtype=np.uint16)
    ids.tofile(tmp_path / "ids")
    one, two = (Tokens(tmp_path / "ids").rows(16, 5).batch(3) for _ in range(2))
    forward = [one[step]["tokens"] for step in range(30)]
    backward = [two[step]["tokens"] for step in reversed(range(30))][::-1]
    np.testing.assert_array_equal(forward, backward)
    assert all((np.diff(batch, axis=1) == 1).all() for batch in forward)
    windows = (1000 - 17) // 16
    first_epoch = np.concatenate(forward)[:windows]
    assert len(set(first_epoch[:, 0].tolist())) == len(first_epoch)
    for epoch, first in ((0, 0), (1, windows)):
        order = np.random.default_rng((5, epoch)).permutation(windows)
        shift = np.random.default_rng((5, epoch, 1)).integers(16)
        found = np.concatenate(forward)[first : first + windows, 0]
        np.testing.assert_array_equal(found, order[: len(found)] * 16 + shift)


def test_a_tokenised_corpus_is_not_mixed_up(tmp_path):
    """The same folder with other settings is refused, not silently reused."""
    prepare(Source((str(trained.text()),)), tmp_path, 300, None)
    with pytest.raises(ValueError, match="choose another --out"):
        prepare(Source((str(trained.text()),)), tmp_path, 400, None)


def test_a_corpus_is_tokenised_whole(tmp_path):
    """Truncation and padding in tokenizer.json do not change the streams."""
    source = Source((str(trained.text()),))
    prepare(source, tmp_path / "plain", 300, None)
    words = tokenizers.Tokenizer.from_file(str(tmp_path / "plain" / "tokenizer.json"))
    words.enable_truncation(7)
    words.enable_padding(length=9)
    words.save(str(tmp_path / "cutting.json"))
    again, *_ = prepare(source, tmp_path / "again", 300, str(tmp_path / "cutting.json"))
    assert (again.truncation, again.padding) == (None, None)
    for name in ("train.bin", "held_out.bin"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def test_held_out_text_is_not_trained_on(tmp_path):
    """Every document is in exactly one of the two streams."""
    tokenizer, train, held_out = prepare(Source((str(trained.text()),)), tmp_path, 300, None)
    parts = [
        tokenizer.decode(t.ids.tolist(), skip_special_tokens=False).split("<|endoftext|>")
        for t in (train, held_out)
    ]
    documents = {document for _, document in read_documents(Source((str(trained.text()),)))}
    assert set(parts[0][1:]) | set(parts[1][1:]) == documents
    assert not set(parts[0][1:]) & set(parts[1][1:])
    assert len(parts[1]) > 1


@pytest.mark.parametrize(
    "files", [{}, {"a.py": b""}, {"a.py": b"\xff\xfe"}, {"a.py": b"x\0y", "b.py": b"z"}]
)
def test_data_without_text_is_refused(tmp_path, files):
    """For empty, binary or missing files the error says how many were found, and that two are
    needed."""
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"UTF-8 texts.*at least two"):
        prepare(Source((str(tmp_path),)), tmp_path / "out", 300, None)


def test_other_text_than_the_pattern_is_named(tmp_path):
    """The error names the pattern, its option, and the files that exist instead."""
    for name in ("a.txt", "b.txt", "c.txt", "more/c.md", "more/d.md", "more/README"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    message = r"0 different .* --pattern '\*\.py' .*: 3 of \.txt, 2 of \.md, 1 of no ending\. "
    with pytest.raises(ValueError, match=message):
        prepare(Source((str(tmp_path),), "*.py"), tmp_path / "out", 300, None)
    prepare(Source((str(tmp_path),), "*.txt"), tmp_path / "out", 300, None)


def test_large_files_are_left_out_aloud(tmp_path, capsys):
    """A message says how many files, which option, and the largest one; this also holds for a
    named file."""
    for name, size in (("a.py", 10), ("b.py", 20), ("c.py", 300), ("d.py", 500)):
        (tmp_path / name).write_text("x" * size)
    assert len(list(read_documents(Source((str(tmp_path),), max_bytes=500)))) == 4
    assert capsys.readouterr().out == ""
    assert len(list(read_documents(Source((str(tmp_path),), max_bytes=200)))) == 2
    said = capsys.readouterr().out
    assert "texts larger than --max-bytes 200, left out: 2" in said and "d.py, 500 bytes" in said
    two = Source((str(tmp_path / "c.py"), str(tmp_path / "d.py")), max_bytes=200)
    with pytest.raises(ValueError, match=r"0 different .*; texts larger than --max-bytes 200: 2"):
        prepare(two, tmp_path / "out", 300, None)
    assert "left out: 2" in capsys.readouterr().out


def test_one_file_of_text_is_enough(tmp_path, capsys):
    """It is read whatever its size, and its end, from a line on, is held out aloud."""
    lines = [f"line {n} of a poem about the number {n * n}\n" for n in range(6000)]
    file = tmp_path / "poem.txt"
    file.write_text("".join(lines))
    assert file.stat().st_size > 200_000
    tokenizer, train, held_out = prepare(Source((str(file),)), tmp_path / "out", 300, None)
    texts = [tokenizer.decode(part.ids.tolist()) for part in (train, held_out)]
    assert "".join(texts) == "".join(lines) and texts[1].startswith("line ")
    assert 0.04 < len(texts[1]) / file.stat().st_size <= 0.05
    said = capsys.readouterr().out
    assert f"one text of {file.stat().st_size} characters: its last {len(texts[1])} are" in said
    again = prepare(Source((str(file),)), tmp_path / "again", 300, None)
    assert (again[1].ids == train.ids).all() and (again[2].ids == held_out.ids).all()


@pytest.mark.parametrize(("length", "cut"), [(999, None), (1000, 950), (2000, 1900)])
def test_where_a_single_text_is_cut(length, cut):
    """Without lines a twentieth is held out; a line may begin a little later, and no more."""
    assert where_to_cut("x" * length) == cut
    if cut is None:
        return
    for line, found in ((0, cut + 1), (3, cut + 4), (length // 40, cut)):
        text = "x" * (cut + line) + "\n" + "y" * (length - cut - line - 1)
        assert where_to_cut(text) == found


def test_a_missing_folder_is_named(tmp_path):
    """The error names the folder and says that it does not exist."""
    with pytest.raises(ValueError, match="nowhere does not exist"):
        prepare(Source((str(tmp_path / "nowhere"),)), tmp_path / "out", 300, None)


def test_an_isolated_document_is_read_as_if_alone():
    """In a packed window, its outputs and positions are those of the document alone."""
    end, model, params = 0, toys.model(), toys.weights()
    documents = [[end, 3, 1, 4, 1], [end, 5, 9], [end, 2, 6, 5, 3, 5, 8]]
    packed = np.array([[7, 7, *itertools.chain(*documents)]])  # the window begins inside a document
    logits = jax.jit(
        lambda tokens, end: read(model, params, tokens, end) @ head_matrix(params), static_argnums=1
    )
    packed_logits = logits(packed, end)
    first = 2
    for document in documents:
        alone = toys.plain_logits(np.pad(document, (0, toys.CAPACITY - len(document)))[None])[0]
        np.testing.assert_allclose(
            packed_logits[first : first + len(document)],
            alone[: len(document)],
            rtol=1e-4,
            atol=1e-4,
        )
        first += len(document)
    assert np.abs(packed_logits - logits(packed, None))[7:].max() > 1e-2, (
        "in the plain stream they see each other"
    )


def test_positions_begin_again():
    """Positions begin again at the start of a document, and only there."""
    positions, mask = isolate(jnp.array([[0, 0, 1, 0, 1, 0, 0]], bool))
    assert positions.tolist() == [[0, 1, 0, 1, 0, 1, 2]]
    assert mask[0].sum(1).tolist() == [1, 2, 1, 2, 1, 2, 3]


def test_isolation_needs_a_token_that_starts_documents(tmp_path):
    """A tokenizer without such a token is refused."""
    tokenizer, _, _ = prepare(Source((str(trained.text()),)), tmp_path, 300, None)
    assert starts_of_documents(tokenizer, True) == 0
    assert starts_of_documents(tokenizer, False) is None
    without = tokenizers.Tokenizer(tokenizers.models.BPE())
    with pytest.raises(ValueError, match="which starts a document"):
        starts_of_documents(without, True)
