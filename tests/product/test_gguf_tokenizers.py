"""The tokenizer in a GGUF file: ids and texts are those that transformers makes of the file."""

import json
import pathlib

import folders
import gguf_files
import numpy as np
import pytest
import tokenizers
from gguf import GGMLQuantizationType as Kind
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

import specjax
from specjax.files.gguf import tokenizer_in
from specjax.files.gguf.vocabulary import _CUTS
from specjax.training.targets import TargetOptions, load_target

SHIPPED = specjax.shipped("pycode/target") / "tokenizer.json"
OWN = "tokenizer.ggml."
TEXTS = (
    "def f(x):\n    return x + 12345  # it's 3.14, isn't it?\n\n\tdone\r\n",
    "  two spaces, Zürich 中文 😀 ÀÉÎ naïve, HTTPServer2Go it'LL",
    "<|endoftext|>a<|mark|>b</s> <s>",
    "interleaved tokenisers restore unforeseen reassertions, and attested ones are interpreted",
    "",
)


def byte_level(pre, path=SHIPPED, **more):
    """The fields of llama.cpp for a byte-level tokenizer, with <|mark|> defined by a user."""
    made = json.loads(path.read_text())
    tokens = sorted(made["model"]["vocab"], key=made["model"]["vocab"].get)
    merges = [" ".join(m) if isinstance(m, list) else m for m in made["model"]["merges"]]
    kinds = [3] + [1] * (len(tokens) - 1) + [4]
    fields = {"model": "gpt2", "pre": pre, "tokens": [*tokens, "<|mark|>"], "token_type": kinds,
              "merges": merges, "bos_token_id": 0, "eos_token_id": 0, **more}  # fmt: skip
    return {OWN + name: value for name, value in fields.items()}


def sentencepiece(**more):
    """The fields of a SentencePiece tokenizer with byte fallback, whose merges are scores."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=600, show_progress=False)
    made.train_from_iterator(pathlib.Path(__file__).read_text().split("\n"), trainer)
    learned = sorted(made.get_vocab(), key=made.get_vocab().get)
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *raw, *learned]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(learned))]
    fields = {"model": "llama", "pre": "default", "tokens": tokens, "scores": scores,
              "token_type": [2, 3, 3] + [6] * 256 + [1] * len(learned), "bos_token_id": 1,
              "eos_token_id": 2, "unknown_token_id": 0, **more}  # fmt: skip
    return {OWN + name: value for name, value in fields.items()}


def written(tmp_path, fields):
    path = tmp_path / "model.gguf"
    gguf_files.write(path, "llama", Kind.F16, fields=fields)
    return path


def read(path):
    files = tokenizer_in(path)
    made = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    return made, json.loads(files["tokenizer_config.json"])


SAME = [pre for pre in _CUTS if pre not in ("llama3", "llama-v3", "falcon3", "smollm")]


@pytest.mark.parametrize("pre", [*SAME, "sentencepiece"])
def test_ids_and_texts_are_those_of_transformers(tmp_path, pre):
    path = written(tmp_path, sentencepiece() if pre == "sentencepiece" else byte_level(pre))
    ours, _ = read(path)
    theirs, _ = convert_gguf_tokenizer(*get_gguf_tokenizer(str(path))[:2])
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(
            ids, skip_special_tokens=False
        )
    assert len(ours.encode(TEXTS[0]).ids) < len(TEXTS[0].encode()), "no merge was applied"


def test_digits_of_smollm_are_pieces_of_their_own(tmp_path):
    """transformers cuts such a file as GPT-2 does; the published tokenizer cuts digits first."""
    ours, _ = read(written(tmp_path, byte_level("smollm")))
    assert ours.encode("x = 12345").tokens[-5:] == list("12345")


def test_a_shipped_tokenizer_is_found_again(tmp_path):
    """GPT-2's cutting gives the ids of the tokenizer from which the file was made."""
    ours, _ = read(written(tmp_path, byte_level("gpt-2")))
    whole = tokenizers.Tokenizer.from_file(str(SHIPPED))
    for text in TEXTS[:2]:
        assert ours.encode(text).ids == whole.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("fields", "first", "last"),
    [
        (byte_level("qwen2"), False, False),
        (byte_level("qwen2", add_bos_token=True), True, False),
        (byte_level("llama-bpe"), True, False),
        (byte_level("llama-bpe", add_bos_token=False, add_eos_token=True), False, True),
        (sentencepiece(), True, False),
    ],
)  # fmt: skip
def test_tokens_around_a_text(tmp_path, fields, first, last):
    """A file may say whether a text begins with BOS; else llama.cpp's default holds."""
    ours, config = read(written(tmp_path, fields))
    inner = ours.encode("a b", add_special_tokens=False).ids
    begin, end = fields[OWN + "bos_token_id"], fields[OWN + "eos_token_id"]
    assert ours.encode("a b").ids == [begin] * first + inner + [end] * last
    assert config["eos_token"] == fields[OWN + "tokens"][end]


def test_a_space_before_a_text(tmp_path):
    """SentencePiece writes one, and keeps it out of the decoded text, unless the file says not."""
    for flag in (True, False):
        ours, _ = read(written(tmp_path, sentencepiece(add_space_prefix=flag)))
        encoded = ours.encode("return", add_special_tokens=False)
        assert encoded.tokens[0].startswith("▁") == flag
        assert ours.decode(encoded.ids) == "return"


def test_a_model_of_a_file_reads_and_writes_text(tmp_path):
    """With the chat template of the file; a tokenizer.json beside it has precedence."""
    fields = byte_level("gpt-2", folders.tokenizer_file(280))
    template = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    path = written(tmp_path, {**fields, "tokenizer.chat_template": template})
    model = specjax.load(path)
    assert model.tokenizer.get_vocab_size() == 281
    how = {"max_new_tokens": 4, "eos": []}
    out = specjax.generate(model, "def main", **how)
    wanted = model.tokenizer.encode("def main").ids
    assert out.tokens == specjax.generate(model, [wanted], **how).tokens
    assert out.text == [model.tokenizer.decode(out.tokens[0])]
    chat = specjax.generate(model, messages=[{"role": "user", "content": "a"}], **how)
    ids = model.tokenizer.encode("a<|endoftext|>").ids
    assert chat.tokens == specjax.generate(model, [ids], **how).tokens
    specjax.save(specjax.load(path, dequantise=True), tmp_path / "saved")
    again = specjax.load(tmp_path / "saved")
    assert again.tokenizer.get_vocab() == model.tokenizer.get_vocab()
    (tmp_path / "tokenizer.json").write_bytes(folders.tokenizer_file(270).read_bytes())
    assert specjax.load(path).tokenizer.get_vocab_size() == 270


def test_a_job_of_training_needs_a_file_of_the_tokenizer(tmp_path):
    """A corpus is kept with the file that it was tokenised with; a saved folder has it."""
    path = written(tmp_path, byte_level("gpt-2", folders.tokenizer_file(280)))
    with pytest.raises(ValueError, match=r"has no tokenizer\.json.*specjax\.save.*--target FOLDER"):
        load_target(TargetOptions(target=str(path)), None)
    specjax.save(specjax.load(path, dequantise=True), tmp_path / "saved")
    load_target(TargetOptions(target=str(tmp_path / "saved")), None)
    (tmp_path / "tokenizer.json").write_bytes(folders.tokenizer_file(270).read_bytes())
    options = TargetOptions(target=str(path))
    assert load_target(options, None).tokenizer.get_vocab_size() == 270
    assert pathlib.Path(options.tokenizer_file) == tmp_path / "tokenizer.json"


REFUSED = {
    "another kind": ({"model": "t5"}, "the kind 't5' .*tokenizer.ggml.model.*gpt2, llama"),
    "another cut": ({"pre": "chameleon"}, "the way 'chameleon' .*llama-bpe.*tokenizer.json of"),
    "no merges": ({"merges": "none"}, r"tokenizer\.ggml\.merges is 'none'; its"),
    "a merge of three": ({"merges": ["a b c"]}, "holds 'a b c', which is not a pair"),
    "kinds of other tokens": ({"token_type": [1, 2]}, "token_type has 2 values for 4097 tokens"),
    "no token of this id": ({"bos_token_id": 5000}, "bos_token_id is 5000, and there are 4097"),
    "more tokens than rows": ({}, "token ids up to 4096, and the embedding only 320 rows"),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_refused_by_name(tmp_path, fault):
    """With the file, the field and the cure."""
    change, message = REFUSED[fault]
    fields = byte_level("gpt-2") | {OWN + name: value for name, value in change.items()}
    path = written(tmp_path, fields)
    with pytest.raises(ValueError, match=f"model.gguf.*{message}"):
        specjax.load(path)


def test_scores_and_long_tokens_are_refused(tmp_path):
    for fields, message in (
        (sentencepiece(scores=[0.5, 0.25]), "scores has 2 values for"),
        (sentencepiece(tokens=["<unk>", "<s>", "</s>", "x" * 257], scores=[0.0] * 4,
                       token_type=[2, 3, 3, 1]), "a token of 257 characters"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            specjax.load(written(tmp_path, fields))


def test_a_file_without_a_tokenizer_takes_ids(tmp_path):
    path = written(tmp_path, {OWN + "model": "no_vocab"})
    model = specjax.load(path)
    assert model.tokenizer is None
    assert np.shape(specjax.generate(model, [[5, 6]], max_new_tokens=3, eos=[]).tokens) == (1, 3)
