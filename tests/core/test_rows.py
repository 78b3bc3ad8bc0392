"""Files of rows as data: JSON lines, parquet, datasets of Hugging Face, and their columns."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import trained
from test_masks import TEMPLATES, target

from specjax.training.conversations import encode_conversation, read_conversations
from specjax.training.corpus import Source, files_of, read_documents
from specjax.training.jobs import distill
from specjax.training.rows import column_of, holds_conversations, read_rows
from specjax.training.tokenising import prepare

TEXTS = ["the cat sat", "on the mat", "and the dog ate"]
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]

QWEN3 = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.index0 < ns.last %}
{{- m.content.split('</think>')[-1] }}{% else %}{{- m.content }}{% endif %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""  # noqa: E501


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def documents(*folders, **options):
    return [text for _, text in read_documents(Source(tuple(map(str, folders)), **options))]


def test_text_of_any_ending(tmp_path):
    """All files that are text are read, but hidden and binary ones; a pattern chooses others."""
    for name, content in {
        "a.txt": b"a", "b.md": b"b", "deep/c": b"c", ".git/config": b"d", "e.png": b"\x89\0",
        ".hidden": b"f", "g.tex": b"\xff\xfe",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert documents(tmp_path) == ["a", "b", "c"]
    assert documents(tmp_path, pattern="*.md") == ["b"]
    assert documents(tmp_path / ".hidden") == ["f"], "a file that is named is read"


def test_texts_of_json_lines(tmp_path, capsys):
    """Each row is a text; long ones are left out, and other files beside them are not read."""
    rows = [{"id": i, "text": text} for i, text in enumerate([*TEXTS, "x" * 100])]
    lines(tmp_path / "data.jsonl", *rows)
    (tmp_path / "README.md").write_text("about")
    assert documents(tmp_path, max_bytes=50) == TEXTS
    said = capsys.readouterr().out
    assert "reading its 1 files of rows; --pattern reads others" in said
    assert "texts larger than --max-bytes 50, left out: 1" in said and "line 4, 100 bytes" in said
    assert documents(tmp_path, pattern="*.md") == ["about"]
    _, train, held_out = prepare(Source((str(tmp_path),)), tmp_path / "out", 300, None)
    assert len(train.ids) and len(held_out.ids)


def test_columns(tmp_path):
    """A column is found by its usual names; another one is named with the nearest that is there."""
    path = lines(tmp_path / "a.jsonl", {"contents": "x", "id": 3})
    fields = next(read_rows(path))[1]
    assert column_of(path, fields, "contents") == "contents"
    assert column_of(path, {"text": "", "messages": []}, None) == "messages"
    for asked, message in (
        (
            "content",
            r"--column content: .*a.jsonl has the columns contents, id; the nearest one is c",
        ),
        ("zzz", r"--column zzz: .* has the columns contents, id$"),
        (None, r"columns contents, id, and none of messages, .*: name one with --column"),
    ):
        with pytest.raises(ValueError, match=message):
            column_of(path, fields, asked)
    with pytest.raises(ValueError, match=r"a.jsonl, line 1: id holds int; it must be a text"):
        documents(path, column="id")
    lines(path, {"text": "x"}, {"other": "y"})
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: text holds NoneType"):
        documents(path)


def test_conversations_need_a_target(tmp_path):
    """A job without a template refuses them, unless they are read elsewhere."""
    path = lines(tmp_path / "a.jsonl", {"messages": CHAT})
    assert holds_conversations(path, None)
    with pytest.raises(ValueError, match="holds conversations, which only a target's chat"):
        documents(path)
    assert documents(path, conversations=(str(path),)) == []


def test_turns_of_sharegpt(tmp_path):
    """`from` and `value` are read like `role` and `content`."""
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
    made = target(TEMPLATES["chatml"], ["<|im_end|>"])
    path = lines(tmp_path / "a.ndjson", {"conversations": turns})
    ((ids, mask),) = read_conversations(made, path)
    ((other, same),) = encode_conversation(made, CHAT)
    assert ids.tolist() == other.tolist() and mask.tolist() == same.tolist()


@pytest.mark.parametrize("column", ["messages", "conversations", "chat"])
def test_conversations_as_json_text(tmp_path, column):
    """They are read like lists of turns, and are no texts; a damaged one is refused."""
    asked = column if column == "chat" else None
    made = target(TEMPLATES["chatml"], ["<|im_end|>"])
    path = lines(tmp_path / "a.jsonl", {column: " " + json.dumps(CHAT, indent=1)}, {column: CHAT})
    assert holds_conversations(path, asked)
    with pytest.raises(ValueError, match="holds conversations, which only a target's chat"):
        documents(path, column=asked)
    first, second = read_conversations(made, path, asked)
    assert first[0].tolist() == second[0].tolist() and first[1].tolist() == second[1].tolist()
    lines(path, {column: json.dumps(CHAT)}, {column: str(CHAT)})
    with pytest.raises(ValueError, match=r"line 2: messages is .*, or the JSON text of such a li"):
        read_conversations(made, path, asked)


def test_texts_that_look_like_conversations(tmp_path):
    """What a text column holds is a text, and so is a rendered conversation in any column."""
    shown, rendered = json.dumps(CHAT), "[INST] hi [/INST] yes"
    path = tmp_path / "a.jsonl"
    for column, text in (("text", shown), ("content", shown), ("messages", rendered)):
        lines(path, {column: text})
        assert not holds_conversations(path, None)
        assert documents(path) == [text]
    for wrong in (str(CHAT), None, {"role": ["user"], "content": ["hi"]}, "{", "[]"):
        lines(path, {"messages": wrong})
        with pytest.raises(ValueError, match="holds conversations, which only a target's chat"):
            documents(path)
    lines(path, {"messages": rendered}, {"messages": shown})
    with pytest.raises(ValueError, match="line 2: messages holds a conversation as JSON text, and"):
        documents(path)


def test_a_template_that_rewrites_earlier_turns():
    """Each answer is a row of its own, after the prompt that the target would read."""
    made = target(QWEN3, ["<|im_end|>"])
    chat = [
        *(("user", "a"), ("assistant", "<think>b</think>c"), ("user", "d")),
        ("assistant", "<think>e</think>f"),
    ]
    messages = [{"role": role, "content": content} for role, content in chat]
    rows = encode_conversation(made, messages)
    assert made.tokenizer is not None
    said = [
        (
            made.tokenizer.decode(ids[~mask].tolist(), skip_special_tokens=False),
            made.tokenizer.decode(ids[mask].tolist(), skip_special_tokens=False),
        )
        for ids, mask in rows
    ]
    first = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    second = first + "c<|im_end|>\n<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n"
    assert said == [
        (first + "\n", "<think>b</think>c<|im_end|>"),
        (second + "\n", "<think>e</think>f<|im_end|>"),
    ]
    assert len(encode_conversation(made, messages[:2])) == 1
    ((ids, mask), _) = encode_conversation(made, messages[1:])
    assert made.tokenizer.decode(ids[~mask].tolist(), skip_special_tokens=False) == (
        "<|im_start|>assistant\n\n"
    ), "an answer that comes first"
    plain = target(TEMPLATES["chatml"], ["<|im_end|>"])
    assert len(encode_conversation(plain, messages)) == 1, "one row where nothing is rewritten"


def test_a_folder_of_everything(tmp_path, capsys):
    """A draft learns from texts and conversations of one folder, which also has other files."""
    made = tmp_path / "target"
    made.mkdir()
    for path in trained.target().iterdir():
        (made / path.name).write_bytes(path.read_bytes())
    (made / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}<|endoftext|>{% endfor %}"
        "{% if add_generation_prompt %}[a]{% endif %}"
    )
    data = tmp_path / "data"
    data.mkdir()
    texts = [path.read_text() for path in sorted(trained.text().iterdir())]
    lines(data / "texts.jsonl", *({"text": text} for text in texts))
    lines(data / "chats.jsonl", *[{"messages": CHAT}] * 4)
    distill.main([
        "--target", str(made), "--data", str(data), "--out", str(tmp_path / "run"), "--steps", "1",
        "--sampled-prompt", "8", *trained.DRAFT_SIZES,
    ])  # fmt: skip
    options = json.loads((tmp_path / "run" / "run.json").read_text())["options"]
    assert options["sampled_fraction"] == 0.5
    assert not (tmp_path / "run" / "sampled").exists(), "the conversations are the answers"
    facts = json.loads((tmp_path / "run" / "corpus" / "corpus.json").read_text())
    assert facts["files"] == len(texts)


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    """The error names the file and the package."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for name in ("a.parquet", "a.arrow"):
        (tmp_path / name).write_bytes(b"PAR1")
        with pytest.raises(ValueError, match=rf"{name} needs the package pyarrow: pip install"):
            documents(tmp_path / name)


def test_parquet_and_datasets(tmp_path):
    """A parquet file, and a folder as `save_to_disk` writes it; a damaged file is named."""
    arrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))

    table = arrow.table({"id": np.arange(3), "text": TEXTS, "messages": [CHAT] * 3})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert documents(tmp_path / "a.parquet", column="text") == TEXTS
    assert holds_conversations(tmp_path / "a.parquet", None)
    made = target(TEMPLATES["chatml"], ["<|im_end|>"])
    rows = read_conversations(made, tmp_path / "a.parquet")
    assert len(rows) == 3 and rows[0][1].any()
    calls = [{"function": {"name": "f", "arguments": {"x": 1}}}, {"function": {"name": "g"}}]
    chat = [CHAT[0], {"role": "assistant", "tool_calls": calls}, {**CHAT[1], "weight": 0}]
    parquet.write_table(arrow.table({"messages": [chat], "text": [None]}), tmp_path / "c.parquet")
    ((_, fields),) = read_rows(tmp_path / "c.parquet")
    assert fields == {"messages": chat, "text": None}, "without the nulls that fill the columns"
    said = arrow.table({"conversations": [json.dumps(CHAT)] * 2})
    parquet.write_table(said, tmp_path / "d.parquet")
    assert holds_conversations(tmp_path / "d.parquet", None)
    assert read_conversations(made, tmp_path / "d.parquet")[1][0].tolist() == rows[0][0].tolist()
    folder = tmp_path / "dataset" / "train"
    folder.mkdir(parents=True)
    for name in ("data-00000-of-00001.arrow", "cache-1.arrow"):
        with arrow.OSFile(str(folder / name), "wb") as sink:
            with arrow.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
    (folder / "state.json").write_text("{}")
    assert [path.suffix for path in files_of(Source((str(tmp_path / "dataset"),)))] == [".arrow"]
    assert documents(tmp_path / "dataset", column="text") == TEXTS
    for name in ("b.parquet", "b.arrow"):
        (tmp_path / name).write_bytes(b"PAR1 is not all of it")
        with pytest.raises(ValueError, match=rf"{name} cannot be read .*: write or download it"):
            documents(tmp_path / name)
