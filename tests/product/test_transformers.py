"""`specjax.generate` against `transformers.generate` with the same settings, greedy, token for
token.

`FOLDERS` lists what is compared; another family needs one more line.
"""

import copy
import functools
import json
import shutil
import warnings

import folders
import jax
import numpy as np
import pytest
import torch
import transformers
import transformers_folders
from published_configs import PUBLISHED
from reference import no_repeated_pair, no_repeated_pair_reference

import specjax
from specjax.files import read_tokenizer

FOLDERS = {"llama": folders.target}
PROMPTS = ["the cat", "on", "a hat, a dog and a rat of"]
NEW = 32


@functools.cache
def ours(family):
    return specjax.load(FOLDERS[family]())


@functools.cache
def theirs(family):
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDERS[family]()).eval()


def prompts(family):
    return [ours(family).tokenizer.encode(prompt).ids for prompt in PROMPTS]


def greedy(family, eos, **options):
    """The new tokens of each prompt alone, and the raw log-probabilities [T, V] of each choice."""
    tokens, logprobs = [], []
    for ids in prompts(family):
        with torch.no_grad():
            out = theirs(family).generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids)),
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=eos,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
                **{
                    name: make(len(ids)) if callable(make) else make
                    for name, make in options.items()
                },
            )
        tokens.append(out.sequences[0, len(ids) :].tolist())
        logprobs.append(torch.log_softmax(torch.cat(out.logits), -1).numpy())
    return tokens, logprobs


class Theirs(transformers.LogitsProcessor):
    """A user's processor for one row, from a NumPy function of logits, text and output."""

    def __init__(self, function, prompt_length):
        self.function, self.prompt_length = function, prompt_length

    def __call__(self, input_ids, scores):
        text = input_ids[0].tolist()
        return torch.tensor(
            self.function(scores[0].numpy(), text, text[self.prompt_length :]), dtype=torch.float32
        )[None]


def counted(x, text, output):
    """Presence penalty 2 and frequency penalty 1, which transformers does not have."""
    counts = np.bincount(output, minlength=len(x)).astype(np.float32)
    return x - counts - np.float32(2) * (counts > 0)


def own(*functions):
    return lambda n: transformers.LogitsProcessorList(
        [Theirs(function, n) for function in functions]
    )


@functools.cache
def plain(family):
    """The text without settings and without EOS; the settings below use its tokens."""
    return specjax.generate(ours(family), prompts(family), max_new_tokens=NEW, eos=[]).tokens


CASES = {
    # our options, those of transformers; `t` are the tokens of `plain`
    "repetition": lambda t: ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    "encouraged repetition": lambda t: ({"repetition_penalty": 0.7}, {"repetition_penalty": 0.7}),
    "presence and frequency": lambda t: (
        {"presence_penalty": 2.0, "frequency_penalty": 1.0},
        {"logits_processor": own(counted)},
    ),
    "bias": lambda t: (
        {"logit_bias": {t[0][2]: -3.0, t[1][4]: -1.0, 17: 4.0}},
        {"sequence_bias": {(t[0][2],): -3.0, (t[1][4],): -1.0, (17,): 4.0}},
    ),
    "bad words": lambda t: ({"bad_words": words(t)}, {"bad_words_ids": words(t)}),
    "least": lambda t: ({"min_new_tokens": 28}, {"min_new_tokens": 28}),
    "function": lambda t: (
        {"logits_processor": no_repeated_pair},
        {"logits_processor": own(no_repeated_pair_reference)},
    ),
    "all": lambda t: (
        {
            "repetition_penalty": 1.2,
            "presence_penalty": 2.0,
            "frequency_penalty": 1.0,
            "logit_bias": {t[0][2]: -3.0, 17: 2.0},
            "bad_words": words(t),
            "min_new_tokens": 9,
            "logits_processor": no_repeated_pair,
        },
        {
            "repetition_penalty": 1.2,
            "sequence_bias": {(t[0][2],): -3.0, (17,): 2.0},
            "bad_words_ids": words(t),
            "min_new_tokens": 9,
            "logits_processor": own(counted, no_repeated_pair_reference),
        },
    ),
}


def words(t):
    return [[t[0][3]], t[1][6:8], t[2][3:6], t[0][9:14]]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FOLDERS)
def test_same_settings_same_tokens(family, case):
    """A ragged batch with speculation against each prompt alone; two tokens of the text are EOS
    ids."""
    eos = [plain(family)[0][24], plain(family)[1][27]]
    mine, other = CASES[case](plain(family))
    draft = specjax.load(folders.draft())
    out = specjax.generate(
        ours(family),
        prompts(family),
        draft=draft,
        num_drafts=2,
        max_new_tokens=NEW,
        eos=eos,
        logprobs=3,
        **mine,
    )
    wanted, logprobs = greedy(family, eos, **other)
    assert out.tokens == wanted
    assert out.tokens != greedy(family, eos)[0]
    assert out.stats.accepted > 0
    for entry, tokens, raw in zip(out.logprobs, wanted, logprobs, strict=True):
        np.testing.assert_allclose(entry.raw, raw[np.arange(len(tokens)), tokens], atol=2e-4)
        np.testing.assert_allclose(entry.top, np.sort(raw)[:, ::-1][:, :3], atol=2e-4)


def test_bad_words_as_texts():
    """A text is banned both at the beginning and after a space."""
    target = ours("llama")
    out = specjax.generate(target, PROMPTS, max_new_tokens=NEW, eos=[])
    word = next(
        w for w in target.tokenizer.get_vocab() if len(w) > 2 and w.isalpha() and w in out.text[0]
    )
    again = specjax.generate(target, PROMPTS, max_new_tokens=NEW, eos=[], bad_words=[word])
    banned = [target.tokenizer.encode(text).ids for text in (word, " " + word)]
    assert again.tokens != out.tokens
    for row in again.tokens:
        assert not any(row[n : n + len(ids)] == ids for ids in banned for n in range(len(row)))


def test_log_probabilities_end_where_the_tokens_end():
    """This also holds at a stop string and for sampled rows; without the option there are none."""
    target = ours("llama")
    whole = specjax.generate(target, PROMPTS, max_new_tokens=NEW, temperature=1.0, logprobs=0)
    stop = whole.text[0][len(whole.text[0]) // 2]
    out = specjax.generate(
        target, PROMPTS, max_new_tokens=NEW, temperature=1.0, logprobs=0, stop=stop
    )
    assert "stop" in out.finish
    for tokens, own_logprobs, full in zip(out.tokens, out.logprobs, whole.logprobs, strict=True):
        assert own_logprobs.raw.shape == own_logprobs.warped.shape == (
            len(tokens),
        ) and own_logprobs.top.shape == (
            len(tokens),
            0,
        )
        np.testing.assert_allclose(own_logprobs.raw, full.raw[: len(tokens)], atol=1e-4)
        np.testing.assert_allclose(own_logprobs.raw, own_logprobs.warped, atol=1e-5)
    assert specjax.generate(target, PROMPTS, max_new_tokens=2).logprobs is None
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(out.logprobs))


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "early name" not in name])
def test_published_files_mean_the_same_here(name):
    """transformers fills in what a file leaves out, and writes its ropes in the new fields; the
    model is the same.  It cannot read the early name ("su") of Phi-3's rope any more, nor the
    number that stands for a switch in Llama 4's files."""
    raw = PUBLISHED[name]
    fields = copy.deepcopy(raw)
    kind, text = fields.pop("model_type"), fields.get("text_config", {})
    if "attn_temperature_tuning" in text:
        text["attn_temperature_tuning"] = bool(text["attn_temperature_tuning"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`rope_scaling` is deprecated", FutureWarning)
        theirs = transformers_folders.configured(kind, **fields).to_dict()
    if kind in specjax.models.NESTED:
        family = specjax.models.NESTED[kind].family(raw, specjax.FAMILIES)
    else:
        family = specjax.FAMILIES[kind]
    assert family.read_config(theirs) == family.read_config(raw)


def test_special_tokens_of_other_files(tmp_path):
    """In random folders the added tokens, their ids and their switches are transformers'."""
    rng = np.random.default_rng(0)
    words = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "the", "cat", "[PAD]", " sp "]

    def some(most: int) -> list[str]:
        return rng.choice(words, rng.integers(most + 1), False).tolist()

    def entry(text: str, **fields: bool) -> dict:
        switches = {n: bool(rng.random() < 0.3) for n in ("lstrip", "rstrip")}
        return {"content": text, "normalized": False, "single_word": False, **switches, **fields}

    text = "the cat<s></s> <|im_start|> sat<|im_end|>\n<|endoftext|>[PAD] sp the "
    for case in range(60):
        folder = tmp_path / str(case)
        folder.mkdir()
        shutil.copy(folders.tokenizer_file(), folder / "tokenizer.json")
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "image_token": "<image>"}
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        config |= dict(zip(names, some(4), strict=False))
        older = dict(zip(["eos_token"], map(entry, some(1)), strict=False))
        if case % 2:
            config["added_tokens_decoder"] = {
                str(400 + i): entry(word, special=True) for i, word in enumerate(some(3))
            }
        elif case % 4:
            config["additional_special_tokens"] = some(3)
            added = {word: 400 + i for i, word in enumerate(some(2))}
            (folder / "added_tokens.json").write_text(json.dumps(added))
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "special_tokens_map.json").write_text(json.dumps(older))
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        read = read_tokenizer(folder / "tokenizer.json")
        assert read.encode(text, add_special_tokens=False).ids == theirs.encode(
            text, add_special_tokens=False
        )
        assert list(map(repr, read.get_added_tokens_decoder().values())) == list(
            map(repr, theirs.backend_tokenizer.get_added_tokens_decoder().values())
        )
