"""Tokenising as a stream: memory, interruptions, and texts that change meanwhile."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
from kills import same
from quadratic_job import Quadratic, train

from specjax.training import tokenising
from specjax.training.corpus import Source, read_documents
from specjax.training.jobs import pretrain
from specjax.training.mixture import Mixture
from specjax.training.shards import save_shard
from specjax.training.tokenising import prepare, prepare_all

FILES = ("tokenizer.json", "train.bin", "held_out.bin", "corpus.json")


class Killed(Exception):
    """Stands for SIGKILL: nothing after it is written."""


@pytest.fixture
def lines(tmp_path):
    """A file of 400 texts, in memory only one at a time."""
    path = tmp_path / "data" / "texts.jsonl"
    path.parent.mkdir()
    texts = (f"{number} " + "the cat sat on the mat " * (number % 40 + 1) for number in range(400))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Source((str(path.parent),))


def contents(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


def test_only_a_few_texts_are_in_memory(tmp_path, monkeypatch):
    """The peak does not grow with the text: five times as much needs less than 1.5 times."""
    monkeypatch.setattr(tokenising, "_BATCH", 1 << 14)
    words = tmp_path / "words"
    (tmp_path / "text").mkdir()
    for name in "ab":
        (tmp_path / "text" / name).write_text(f"{name} the cat sat on the mat " * 40)
    prepare(Source((str(tmp_path / "text"),)), words, 300, None)

    def peak(count):
        folder = tmp_path / f"{count}"
        folder.mkdir()
        with open(folder / "a.jsonl", "w") as file:
            for number in range(count):
                text = np.random.default_rng(number).bytes(2048).hex()
                file.write(json.dumps({"text": text}) + "\n")
        tracemalloc.start()
        made = prepare(Source((str(folder),)), folder / "out", 300, str(words / "tokenizer.json"))
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(made[1].ids) + len(made[2].ids) > 1000 * count
        return most

    small, large = peak(100), peak(500)
    assert large < 1.5 * small


def interrupted(monkeypatch, lines, out, at=1):
    """`prepare` that ends when it has written some parts, and the number of the texts in them."""
    saved = []

    def dying(path, arrays):
        save_shard(path, arrays)
        saved.append(path)
        if len(saved) == at:
            (path.parent / "1.partial").write_bytes(b"half of a part")
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(tokenising, "save_shard", dying)
        with pytest.raises(Killed):
            prepare(lines, out, 280, None)
    assert not (out / "corpus.json").exists()


@pytest.mark.parametrize("at", [1, 3])
def test_an_interrupted_call_goes_on(lines, tmp_path, monkeypatch, capsys, at):
    """It ends with the bytes of an undisturbed one, and tokenises no text twice that was saved."""
    monkeypatch.setattr(tokenising, "_BATCH", 1 << 14)
    prepare(lines, tmp_path / "whole", 280, None)
    interrupted(monkeypatch, lines, tmp_path / "cut", at)
    monkeypatch.setattr(tokenising, "_trained", None)  # it is not trained again
    ids, made = tokenising._ids, []

    def counted(split, words, batch):
        made.extend(batch)
        return ids(split, words, batch)

    monkeypatch.setattr(tokenising, "_ids", counted)
    capsys.readouterr()
    prepare(lines, tmp_path / "cut", 280, None)
    kept = 400 - len(made)
    assert 0 < kept < 400
    assert f"{kept} of 400 texts were tokenised already" in capsys.readouterr().out
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert sorted(path.name for path in (tmp_path / "cut").iterdir()) == sorted(FILES)


@pytest.mark.parametrize("damage", ["parts", "progress.json", "tokenizer.json", "settings"])
def test_progress_that_does_not_fit_begins_again(lines, tmp_path, monkeypatch, capsys, damage):
    """A damaged file, or other settings: the result is that of an undisturbed call."""
    monkeypatch.setattr(tokenising, "_BATCH", 1 << 14)
    size = 270 if damage == "settings" else 280
    prepare(lines, tmp_path / "whole", size, None)
    interrupted(monkeypatch, lines, tmp_path / "cut")
    if damage == "parts":
        (path,) = (tmp_path / "cut" / "parts").glob("*.safetensors")
        raw = path.read_bytes()
        path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    elif damage != "settings":
        path = tmp_path / "cut" / damage
        path.write_bytes(path.read_bytes()[:-3])
    capsys.readouterr()
    prepare(lines, tmp_path / "cut", size, None)
    said = capsys.readouterr().out
    if damage == "parts":
        assert "(its SHA-256 differs); it is written again" in said
    else:
        assert "does not fit: --data is tokenised from the beginning" in said
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_texts_that_change_meanwhile_are_noticed(lines, tmp_path, monkeypatch):
    """Before the place where an interrupted call goes on, and behind it."""
    monkeypatch.setattr(tokenising, "_BATCH", 1 << 14)
    interrupted(monkeypatch, lines, tmp_path / "out")
    file = tmp_path / "data" / "texts.jsonl"
    text = file.read_text()
    file.write_text(text.replace('"0 the', '"zero the'))
    with pytest.raises(ValueError, match=r"--data has changed since .*out was begun: delete it"):
        prepare(lines, tmp_path / "out", 280, None)
    file.write_text(text + '{"text": "one more"}\n')
    with pytest.raises(ValueError, match=r"had 400 texts and now has 401: it must not change"):
        prepare(lines, tmp_path / "out", 280, None)


def test_a_mixture_of_texts_is_trained_on(tmp_path, capsys):
    """One tokenizer for all entries, rows in turns; the run resumes, and a part with another
    tokenizer is refused.  Ten numbers learn from it, as a model would."""
    texts = [tmp_path / "a", tmp_path / "b"]
    for number, folder in enumerate(texts):
        folder.mkdir()
        for name in range(4):
            (folder / f"{name}.txt").write_text(f"{'xyz'[number]} {name} " * 400)
    source, corpus = Source(tuple(map(str, texts))), tmp_path / "corpus"
    words, mixed, held_out = prepare_all(source, (3.0, 1.0), corpus, 300, None)
    assert capsys.readouterr().out.count("training a tokenizer of 300 tokens on 8 files") == 1
    assert isinstance(mixed, Mixture) and isinstance(held_out, Mixture)
    job = Quadratic(text=mixed)
    rows = [words.decode(row.astype(int)) for step in range(4) for row in job.batch(step)["y"]]
    assert sum("x" in row for row in rows) == 12 and sum("y" in row for row in rows) == 4
    train(tmp_path / "run", job)
    for stop in (2, 0):
        again = prepare_all(source, (3.0, 1.0), corpus, 300, None)[1]
        assert isinstance(again, Mixture) and again.inputs == mixed.inputs
        train(tmp_path / "cut", Quadratic(text=again), stop_at=stop)
    assert same(tmp_path / "cut", tmp_path / "run")
    train(tmp_path / "other", Quadratic(text=mixed.parts[0]))
    with pytest.raises(AssertionError, match=r"model/x\.npy"):
        same(tmp_path / "other", tmp_path / "run")
    part = corpus / "1"
    words = json.loads((part / "tokenizer.json").read_text())
    (part / "tokenizer.json").write_text(json.dumps(words))
    facts = json.loads((part / "corpus.json").read_text())
    facts["sha256"]["tokenizer.json"] = tokenising.digest(part / "tokenizer.json")
    (part / "corpus.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="have different tokenizers: delete it"):
        prepare_all(source, (3.0, 1.0), corpus, 300, None)


def test_weights_reach_the_job(tmp_path, capsys):
    """`train.pretrain --weights` reads its text as such a mixture, and needs one for each entry."""
    texts = [tmp_path / name for name in "ab"]
    for folder in texts:
        folder.mkdir()
        for name in range(4):
            (folder / f"{name}.txt").write_text(f"{folder.name} {name} " * 400)
    options = pretrain.PretrainOptions(
        data=tuple(map(str, texts)), weights=(3.0, 1.0), out=str(tmp_path / "run"),
        vocab_size=300, sequence_length=32, hidden_size=16, mlp_size=16, num_heads=2,
        num_kv_heads=1, num_layers=1,
    )  # fmt: skip
    job = pretrain.make_job(options)
    assert isinstance(job.train, Mixture) and isinstance(job.held_out, Mixture)
    assert job.train.weights == job.held_out.weights == (3.0, 1.0)
    given = ["--data", *map(str, texts), "--out", str(tmp_path / "run"), "--weights", "3"]
    with pytest.raises(SystemExit):
        pretrain.main(given)
    assert "--weights 3.0 are 1, and --data has 2 entries" in capsys.readouterr().err


def test_messages_are_not_repeated(tmp_path, capsys):
    """The texts are read several times, and what is left out is said once."""
    for name, size in (("a.txt", 10), ("b.txt", 20), ("c.txt", 300)):
        (tmp_path / name).write_text("x" * size)
    prepare(Source((str(tmp_path),), max_bytes=100), tmp_path / "out", 300, None)
    assert capsys.readouterr().out.count("left out: 1") == 1
    assert len(list(read_documents(Source((str(tmp_path),), "*.txt"), tells=False))) == 3
