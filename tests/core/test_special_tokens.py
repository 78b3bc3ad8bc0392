"""Special tokens that only the files beside tokenizer.json name have one id each."""

import json
import pathlib
from typing import Any

import pytest
import tokenizers

from specjax.files.tokenizer import find_tokenizer, read_tokenizer

END = "<|endoftext|>"
TEXT = f"the<|im_start|>cat<|im_end|>{END}"


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """The bytes, "the" (257), "cat" (258), and <|im_start|> (261) and <|im_end|> (262), which are
    in the vocabulary; as an added token tokenizer.json names <|endoftext|> (0) alone."""
    vocab = {END: 0}
    for letter in sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()):
        vocab[letter] = len(vocab)
    vocab |= {"the": 257, "cat": 258}
    parts = [("t", "h"), ("c", "a"), ("th", "e"), ("ca", "t")]
    for left, right in parts[:2]:
        vocab[left + right] = len(vocab)
    vocab |= {"<|im_start|>": 261, "<|im_end|>": 262}
    ids = {text: i for i, text in enumerate(vocab)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ids, parts))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([END])
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder: pathlib.Path, **files: Any) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def pieces(tokenizer: tokenizers.Tokenizer, text: str = TEXT) -> list[str]:
    return tokenizer.encode(text).tokens


MARKS = ["<|im_start|>", "<|im_end|>"]
OBJECTS = [{"content": text, "lstrip": False, "special": True} for text in MARKS]
PLACES: dict[str, dict[str, Any]] = {
    "fields": {"tokenizer_config": {"bos_token": MARKS[0], "eos_token": OBJECTS[1]}},
    "a field of its own": {"tokenizer_config": {"turn_token": MARKS[0], "eos_token": MARKS[1]}},
    "by id": {"tokenizer_config": {"added_tokens_decoder": dict(zip("78", OBJECTS, strict=True))}},
    "a list": {"tokenizer_config": {"additional_special_tokens": MARKS}},
    "names": {"tokenizer_config": {"extra_special_tokens": dict(zip("ab", MARKS, strict=True))}},
    "the older file": {"special_tokens_map": {"additional_special_tokens": OBJECTS}},
    "two files": {"special_tokens_map": {"bos_token": MARKS[0]}, "added_tokens": {MARKS[1]: 262}},
}


@pytest.mark.parametrize("place", PLACES)
def test_one_id_wherever_a_token_is_named(folder, place):
    """Before they are named, the texts of the tokens are split like any others."""
    assert len(pieces(read_tokenizer(folder / "tokenizer.json"))) > 20
    write(folder, **PLACES[place])
    for read in (read_tokenizer(folder / "tokenizer.json"), find_tokenizer(folder, 263)):
        assert pieces(read) == ["the", MARKS[0], "cat", MARKS[1], END]
        assert read.encode(TEXT).ids[1::2] == [261, 262]
        assert read.decode(read.encode(TEXT).ids) == (
            f"thecat{MARKS[1]}" if place == "two files" else "thecat"
        )


def test_what_is_named_again_changes_nothing(folder):
    """The tokenizer is the file's, and it is not built twice."""
    before = read_tokenizer(folder / "tokenizer.json").to_str()
    write(folder, tokenizer_config={"eos_token": END, "pad_token": None, "add_bos_token": True})
    assert read_tokenizer(folder / "tokenizer.json").to_str() == before


def test_a_new_token_needs_a_row_of_the_embedding(folder):
    """A token that the vocabulary lacks gets the next id.  Without a row the model could not read
    it, so its text is split as before."""
    names = ["<new>", "<newer>"]
    write(folder, tokenizer_config={"additional_special_tokens": names})
    for rows, known in ((None, 2), (265, 2), (264, 1), (263, 0)):
        read = read_tokenizer(folder / "tokenizer.json", rows)
        assert [read.token_to_id(name) for name in names[:known]] == [263, 264][:known]
        assert [len(pieces(read, name)) == 1 for name in names] == [known > 0, known > 1]


def test_switches_are_kept(folder):
    """`lstrip` takes the spaces before a token; an entry by id counts before tokenizer.json."""
    ends = {"content": END, "special": False, "normalized": False}
    start = {"content": MARKS[0], "lstrip": True, "special": True, "normalized": False}
    write(folder, tokenizer_config={"added_tokens_decoder": {"0": ends, "261": start}})
    read = read_tokenizer(folder / "tokenizer.json")
    assert read.encode(f"the  {MARKS[0]}cat").ids == [257, 261, 258]
    assert read.decode([257, 0]) == f"the{END}"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": {"eos_token": 5}}, "eos_token is 5"),
        ({"tokenizer_config": {"eos_token": {"content": "a", "lstrip": 1}}}, "eos_token is"),
        ({"tokenizer_config": {"added_tokens_decoder": [1]}}, r"added_tokens_decoder is \[1\]"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": "a"}}}, "added_tokens_decoder is"),
        ({"special_tokens_map": {"additional_special_tokens": 5}}, "tokens is 5"),
        ({"added_tokens": {"<a>": "7"}}, r"the id of .<a>. in added_tokens.json is .7."),
        ({"special_tokens_map": [1]}, "special_tokens_map.json holds a list"),
    ],
)
def test_tokens_of_another_form(folder, files, message):
    """The error names the folder, the field and its value."""
    write(folder, **files)
    with pytest.raises(ValueError, match=message) as caught:
        read_tokenizer(folder / "tokenizer.json")
    assert str(folder) in str(caught.value)
