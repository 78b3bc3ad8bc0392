"""Loss masks: of a conversation only the assistant's replies are learned, and --show-mask shows
it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import types

import folders
import numpy as np
import pytest
import trained
from test_chat import TEMPLATES

import specjax
from specjax.text.chat import render
from specjax.training import masks
from specjax.training.conversations import encode_conversation, read_conversations
from specjax.training.jobs import distill
from specjax.training.material import learned
from specjax.training.written import Written

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
SIMPLE = {
    "zephyr": "{% for m in messages %}"
    "{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    "phi": "{% for m in messages %}"
    "{{ '<|' + m.role + '|>' + '\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    "marked": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "default system": "{% if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nthe rat<|im_end|>\n' }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "mistral": "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}",
}
# The token that ends a turn, by template.
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "llama2": "</s>",
        "zephyr": "</s>", "mistral": "</s>", "marked": "<|im_end|>",
        "default system": "<|im_end|>"}  # fmt: skip
# What opens an answer; llama2 and mistral open none.
OPENS = {"chatml": "<|im_start|>assistant\n", "marked": "<|im_start|>assistant\n",
         "llama3": "<|start_header_id|>assistant<|end_header_id|>\n\n",
         "default system": "<|im_start|>assistant\n",
         "gemma": "<start_of_turn>model\n", "zephyr": "<|assistant|>\n"}  # fmt: skip
CHATS = {
    "turns": [
        ("user", "the cat?"),
        ("assistant", "on the mat"),
        ("user", "and ü the dog"),
        ("assistant", "ate it"),
    ],
    "the reply repeats the question": [
        ("user", "the cat"),
        ("assistant", "the cat"),
        ("user", "the cat"),
        ("assistant", "the cat"),
    ],
    "an empty system turn": [("system", ""), ("user", "the cat?"), ("assistant", "on the mat")],
    "an answer comes first": [
        ("assistant", "the mat?"),
        ("user", "the cat"),
        ("assistant", "the mat"),
    ],
    "only an answer": [("assistant", "and the dog")],
    "several answers": [("user", "the cat"), ("assistant", "ate it"), ("assistant", "and slept")],
    "an empty answer": [("user", "the cat"), ("assistant", ""), ("user", "a"), ("assistant", "b")],
}
STRICT = ("an answer comes first", "only an answer", "several answers")
"""What templates refuse that want questions and answers in turn."""


def target(template, ends=()):
    """What `encode_conversation` needs of a target, whose tokenizer has the ends of turns as
    tokens."""
    words = folders.tokenizer()
    words.add_special_tokens([*SPECIAL.values(), *ENDS.values()])
    files = {"tokenizer_config.json": json.dumps({"chat_template": template, **SPECIAL}).encode()}
    eos = tuple(words.token_to_id(end) for end in ends)
    return specjax.LanguageModel(types.SimpleNamespace(), {}, words, eos, "chatty", files=files)


@pytest.mark.parametrize(
    ("name", "chat"),
    [(name, chat) for name in ENDS for chat in CHATS if name != "gemma" or chat not in STRICT],
)
def test_no_prompt_token_is_learned(name, chat):
    """Checked by characters, independently of the mask's code: a token is learned if and only if
    all of it lies in a reply or in the token that ends one."""
    turns = [
        turn for turn in CHATS[chat] if turn[0] != "system" or name not in ("gemma", "mistral")
    ]
    messages = [{"role": role, "content": content} for role, content in turns]
    made = target({**TEMPLATES, **SIMPLE}[name], [ENDS[name]])
    assert made.tokenizer is not None
    ((ids, mask),) = encode_conversation(made, messages)
    text, spans = render(made.files, messages, add_generation_prompt=False), []
    after = len("<s>") * text.startswith("<s>")
    for number, (role, content) in enumerate(turns):
        if role != "assistant":
            after = text.index(content, after) + len(content)
            continue
        opening = OPENS.get(name, "[/INST]" if number and turns[number - 1][0] == "user" else "")
        begin = text.index(opening, after) + len(opening)
        assert text[begin:].strip().startswith(content)
        after = text.index(ENDS[name], begin) + len(ENDS[name])
        spans.append((begin, after))
    encoded = made.tokenizer.encode(text, add_special_tokens=False)
    assert encoded.ids == ids.tolist()
    wanted = [any(low <= a and b <= high for low, high in spans) for a, b in encoded.offsets]
    assert mask.tolist() == [False, *wanted[1:]], "nothing stands before the first token"
    assert 0 < mask.sum() < len(mask)


def test_a_boundary_that_is_not_certain_is_refused(tmp_path):
    """Some templates write a turn differently once another follows."""
    later = "{% for m in messages %}[{{ m.content if loop.last else '' }}]{% endfor %}"
    chat = [{"role": role, "content": content} for role, content in CHATS["turns"]]
    with pytest.raises(ValueError, match="where message 1 begins cannot be told"):
        encode_conversation(target(later), chat)
    assert len(encode_conversation(target(SIMPLE["phi"]), chat)) == 2, "a row for each answer"
    path = tmp_path / "chats.jsonl"
    for text, message in [
        (
            '{"messages": [{"role": "user", "content": "x"}]}\n',
            "line 1: no message has the role assistant",
        ),
        ('\n{"prompt": "x"}\n', "line 2: .*chats.jsonl has the columns prompt, and none of mess"),
        ("5\n", 'line 1: it must be an object like {"messages"'),
        ('{"messages": "[{"}\n', r"line 1: messages is '\[\{'; it must be a list of turns"),
        ('{"messages": 5}\n', "line 1: messages is 5; it must be a list of turns"),
        ('{"messages": ["x"]}\n', r"line 1: messages is \['x'\]; it must be a list of turns"),
        (
            '{"messages": [{"role": "user", "content": "\\ud800"}, '
            '{"role": "assistant", "content": "x"}]}\n',
            "line 1: the conversation is the text .* which cannot be encoded",
        ),
        ("[" * 100_000 + "\n", "line 1: "),
        ("\n", "holds no conversation"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_conversations(target(TEMPLATES["chatml"]), path)
    path.write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match=r"chats\.jsonl is not UTF-8"):
        read_conversations(target(TEMPLATES["chatml"]), path)


def said(made, row):
    """The text of a row, with its learned parts in brackets."""
    (ids, mask), text = row, ""
    pairs = zip(mask.tolist(), ids.tolist(), strict=True)
    for is_learned, run in itertools.groupby(pairs, lambda pair: pair[0]):
        part = made.tokenizer.decode([token for _, token in run], skip_special_tokens=False)
        text += f"⟦{part}⟧" if is_learned else part
    return text


def test_weights_of_answers():
    """OpenAI's "weight": 0 leaves an answer out, in every layout; the tokens stay the same."""
    made = target(TEMPLATES["chatml"], ["<|im_end|>"])
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "weight": 0},
        {"role": "user", "content": "c", "weight": None},
        {"role": "assistant", "content": "d", "weight": 1},
        {"role": "assistant", "content": "e", "weight": 0.0},
    ]
    (row,) = encode_conversation(made, chat)
    assert re.findall("⟦(.*?)⟧", said(made, row)) == ["d<|im_end|>"]
    plain = [{**turn, "weight": None} for turn in chat]
    ((ids, mask),) = encode_conversation(made, plain)
    assert ids.tolist() == row[0].tolist() and mask.sum() == 6
    sharegpt = [
        {"from": {"user": "human", "assistant": "gpt"}[turn["role"]], "value": turn["content"],
         "weight": turn["weight"]} for turn in chat if "weight" in turn
    ]  # fmt: skip
    (row,) = encode_conversation(made, [{"from": "human", "value": "a"}, *sharegpt])
    assert re.findall("⟦(.*?)⟧", said(made, row)) == ["d<|im_end|>"]
    later = "{% for m in messages %}[{{ m.content if loop.last else '' }}]{% endfor %}"
    first = [{"role": "assistant", "content": "x", "weight": 0}, *chat[2:4]]
    with pytest.raises(ValueError, match=r'where message 2 begins .*: .*; give it "weight": 0'):
        encode_conversation(target(later), first)
    rows = encode_conversation(target(SIMPLE["phi"]), chat[:4])
    assert len(rows) == 1, "no row for an answer that is not learned"


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"role": "assistant", "weight": 0.5}, "message 1 has weight 0.5; a weight is 0, which"),
        ({"role": "assistant", "weight": -1}, "message 1 has weight -1; a weight is 0"),
        ({"role": "assistant", "weight": "0"}, "message 1 has weight '0'; a weight is 0"),
        ({"role": "user", "weight": 1}, "message 1 has weight 1 and the role 'user', and only"),
        ({"role": "assistant", "weight": 0}, "every answer has weight 0, so there is nothing"),
        ({"role": "assistant", "content": None}, "message 1 has no content and no tool_calls"),
        ({"role": "assistant", "content": None, "value": "x"}, "its fields are content, role, val"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "message 1 has no content"),
    ],
)
def test_turns_that_say_something_else_are_refused(turn, message):
    """A weight that is not honoured, and a turn that a template would write as nothing."""
    chat = [{"role": "user", "content": "a"}, {"content": "b", **turn}]
    with pytest.raises(ValueError, match=message):
        encode_conversation(target(TEMPLATES["chatml"]), chat)


def test_calls_of_tools():
    """A turn may hold calls and no content; null fields are left out, and the template reads the
    tools of a row."""
    template = (
        "{% if tools is not none %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
        "<{{ m.role }}>{% if m.tool_calls is defined %}{% for call in m.tool_calls %}"
        "{{ call.function | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}</s>"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    made, tools = target(template, ["</s>"]), [{"type": "function", "function": {"name": "f"}}]
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": None}}}
    chat = [
        {"role": "user", "content": "a", "tool_calls": None, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "weight": None},
        {"role": "tool", "content": "b", "tool_calls": None},
        {"role": "assistant", "content": "c", "tool_calls": None},
    ]
    wanted = (
        '<user>a</s><assistant>⟦{"name": "f", "arguments": {"x": null}}</s>⟧'
        "<tool>b</s><assistant>⟦c</s>⟧"
    )
    (row,) = encode_conversation(made, chat)
    assert said(made, row) == wanted
    for given in (tools, json.dumps(tools)):
        (row,) = encode_conversation(made, json.dumps(chat), given)
        assert said(made, row) == json.dumps(tools) + wanted
    with pytest.raises(ValueError, match="tools is 'f'; it must be a list of objects"):
        encode_conversation(made, chat, "f")


def test_system_turns_that_a_template_merges():
    """A template that writes the system turn into the question that follows it."""
    made = target(TEMPLATES["llama2"], ["</s>"])
    chat = [("system", "the rat"), ("user", "the cat"), ("assistant", "the mat")]
    (row,) = encode_conversation(made, [{"role": role, "content": text} for role, text in chat])
    assert said(made, row) == (
        "<s>[INST] <<SYS>>\nthe rat\n<</SYS>>\n\nthe cat [/INST]⟦ the mat </s>⟧"
    )


def test_prompts_that_fill_a_sequence_are_skipped(capsys):
    """A sequence cut behind its prompt would look like plain text, all of which is learned."""
    ids = np.arange(1, 9, dtype=np.int32)
    made = Written.of([(ids, ids > 6), (ids, ids > 2)], 4)
    assert made.tokens.tolist() == [[1, 2, 3, 4, 5]]
    assert made.drawn.tolist() == [[0, 1, 1, 1]]
    assert "skipped 1 of 2 sequences" in capsys.readouterr().out
    with pytest.raises(ValueError, match="every prompt fills --sequence-length 4"):
        Written.of([(ids, ids > 6)], 4)


def test_what_is_learned_of_a_batch():
    """Drawn tokens are learned, all of a text, prompts only on request, and padding never."""
    drawn = np.array([[0, 0, 1, 1, 0], [0, 0, 0, 0, 0]], np.float32)
    assert learned(drawn).tolist() == [[0, 0, 1, 1, 0], [1] * 5]
    assert learned(drawn, prompts=True).tolist() == [[1, 1, 1, 1, 0], [1] * 5]


def test_colours(monkeypatch):
    """Each kind of stretch has its colour, or brackets without colours; escapes in the text are
    shown as text."""
    words = folders.tokenizer()
    ids = words.encode("the cat\x1b sat", add_special_tokens=False).ids
    mask = np.arange(len(ids)) >= len(words.encode("the cat", add_special_tokens=False).ids)
    monkeypatch.setenv("NO_COLOR", "1")
    count = f"--- {mask.sum()} of {len(ids)} tokens are learned\n"
    assert masks.paint(ids, mask, words) == count + "the cat⟦\\x1b sat⟧"
    padded = masks.paint([*ids, *[0] * 9], [*mask, *[False] * 9], words)
    assert padded.endswith("⟦\\x1b sat⟧\n(9 tokens of padding)")
    monkeypatch.delenv("NO_COLOR")
    assert (
        masks.paint(ids, mask, words) == count + "\x1b[2mthe cat\x1b[0m\x1b[1;32m\\x1b sat\x1b[0m"
    )


def test_show_mask_of_conversations(tmp_path, monkeypatch, capsys):
    """For a file of conversations the mask of the first step is printed, and nothing is trained."""
    made = trained.target()
    model = tmp_path / "target"
    model.mkdir()
    for path in made.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}<|endoftext|>{% endfor %}"
        "{% if add_generation_prompt %}[a]{% endif %}"
    )
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    chats.write_text(
        json.dumps({"messages": turns}) + "\n" + json.dumps({"messages": turns * 2}) + "\n"
    )
    monkeypatch.setenv("NO_COLOR", "1")
    command = ["--target", str(model), "--data", str(chats), "--out", str(tmp_path / "run"),
               "--sampled-prompt", "8",
               *trained.DRAFT_SIZES]  # fmt: skip
    distill.main([*command, "--show-mask"])
    out = capsys.readouterr().out
    assert "[u]hi<|endoftext|>[a]⟦yes<|endoftext|>⟧" in out
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=r"did not draw the answers in .*, and this loss"):
        distill.main([*command, "--loss", "accepted-length"])
    defaults = {f.name: f.default for f in dataclasses.fields(distill.DistillOptions)}
    options = distill.DistillOptions(**{**defaults, "target": "", "data": (), "online": True})
    with pytest.raises(ValueError, match="with --online the tokens are written during the step"):
        distill.Distill.show(types.SimpleNamespace(options=options), {})  # pyright: ignore
