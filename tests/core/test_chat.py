"""Chat templates: text and token ids equal those of transformers' apply_chat_template.

`fixtures/make_transformers.py` stored what transformers says.
"""

import dataclasses
import datetime
import json
import sys

import chats
import counted
import folders
import pytest
import stored
import table_pair
from chats import CHATS, SPECIAL, TEMPLATES

import specjax
from specjax.cli import main
from specjax.text.chat import render


def files(template, **config):
    return {"tokenizer_config.json": json.dumps({"chat_template": template, **config}).encode()}


@pytest.mark.parametrize("prompt", [True, False], ids=["open", "closed"])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_text_is_that_of_transformers(name, chat, prompt):
    """The text is equal; where the template refuses a conversation, both raise its message."""
    given = files(TEMPLATES[name], **SPECIAL)
    if name == "gemma" and chat == "system":
        with pytest.raises(ValueError, match="System role not supported"):
            render(given, CHATS[chat])
        return
    wanted = stored.said()["chats"][f"{name} {chat} {'open' if prompt else 'closed'}"]
    year = str(datetime.date.today().year)
    ours = render(given, CHATS[chat], add_generation_prompt=prompt)
    assert ours == wanted.replace(stored.YEAR, year)
    assert "strftime_now" not in TEMPLATES[name] or year in ours


def test_where_a_template_stands():
    """chat_template.jinja wins over tokenizer_config.json; of several named templates the
    default is used."""
    chat = CHATS["one"]
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert render(files(named), chat) == "plain"
    assert render({**files("config"), "chat_template.jinja": b"file"}, chat) == "file"
    with pytest.raises(ValueError, match="tool_use"):
        render(files(named[:1]), chat)


def test_special_tokens_in_every_spelling():
    """A special token may be a string or an object; tokenizer_config.json wins over
    special_tokens_map.json."""
    template = "{{ bos_token }}{{ eos_token }}{{ unk_token is defined }}"
    folder = files(template, bos_token={"content": "<a>", "lstrip": False})
    folder["special_tokens_map.json"] = json.dumps(
        {"bos_token": "<x>", "eos_token": {"content": "<b>"}}
    ).encode()
    assert render(folder, CHATS["one"]) == "<a><b>False"


def test_variables_reach_the_template():
    """Extra variables, such as switches of some templates, are passed on."""
    folder = files("{{ enable_thinking }}")
    assert render(folder, CHATS["one"], enable_thinking=False) == "False"


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_reaches_nothing(attack):
    """A template comes from a stranger's folder, so it must not reach Python."""
    with pytest.raises(ValueError, match="template"):
        render(files(attack), CHATS["one"])


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": "https://x/y.png"}}, "image_url"),
        ({"type": "image", "image": "y.png"}, "image"),
        ({"image": "y.png"}, "image"),
        ({"type": "video"}, "video"),
        ({"type": "input_audio", "input_audio": {}}, "input_audio"),
    ],
)
def test_a_part_that_is_no_text_is_refused(part, kind):
    """A template would write a placeholder for it, and the model would read the placeholder."""
    turns = [CHATS["one"][0], {"role": "user", "content": [{"type": "text", "text": "hi"}, part]}]
    with pytest.raises(ValueError, match=f"messages\\[1\\] has a part of the type '{kind}'"):
        render(files("{{ messages }}"), turns)
    del turns[1]["content"][1]
    assert "hi" in render(files("{{ messages }}"), turns)


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (None, CHATS["one"], "no chat template"),
        ("{% for %}", CHATS["one"], "damaged"),
        ("{{ 1 + 'a' }}", CHATS["one"], "refuses"),
        ("x", [], "role"),
        ("x", ["hello"], "role"),
        ("x", [{"content": "hello"}], "role"),
    ],
)
def test_mistakes_are_named(template, messages, words):
    """The error says what is wrong."""
    with pytest.raises(ValueError, match=words):
        render({} if template is None else files(template), messages)


def test_without_jinja2(monkeypatch):
    """The error names the extra that installs it."""
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ValueError, match=r"pip install -e .*\[chat\]"):
        render(files("a template that was not compiled before"), CHATS["one"])


# --- through generate and the command line --------------------------------------------------------


def tabled(folder):
    """What a folder holds around its weights, with a table model."""
    loaded, table = specjax.load(folder), table_pair.target()
    return dataclasses.replace(loaded, model=table.model, params=table.params)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    return chats.chatty(tmp_path_factory.mktemp("chat"))


def test_ids_are_those_of_transformers(chatty):
    """No special token is added to those that the template has written."""
    loaded, wanted = tabled(chatty), stored.said()["ids of turns"]
    assert wanted[0] == 0 != wanted[1]
    options = {"max_new_tokens": 8, "temperature": 1.0, "proposer": "none"}
    both = specjax.generate(loaded, messages=[CHATS["turns"], CHATS["one"]], seed=[0, 1], **options)
    alone = specjax.generate(loaded, [wanted, wanted], seed=[0, 0], **options)
    assert len(both.text) == 2
    assert both.tokens[0] == alone.tokens[0] == alone.tokens[1]


def test_one_conversation_streams_strings(chatty):
    """One conversation streams strings, as one prompt does; a list of conversations streams
    lists."""
    loaded = tabled(chatty)
    options = {"max_new_tokens": 8, "stream": True, "proposer": "none"}
    pieces = specjax.generate(loaded, messages=CHATS["one"], **options)
    assert all(isinstance(piece, str) for piece in pieces)
    pieces = specjax.generate(loaded, messages=[CHATS["one"]], **options)
    assert all(isinstance(piece, list) for piece in pieces)


def test_a_conversation_without_tokens(chatty):
    loaded = specjax.load(chatty)
    silent = dataclasses.replace(loaded, files={"chat_template.jinja": b""})
    with pytest.raises(ValueError, match=r"conversation 0 of messages= .*without tokens.*turn"):
        specjax.generate(silent, messages=CHATS["one"], max_new_tokens=8)


@pytest.mark.parametrize(
    ("folder", "options", "words"),
    [
        ("chatty", {"prompts": "a", "messages": CHATS["one"]}, "not both"),
        ("chatty", {"messages": []}, r"messages=\[\]; pass a list of at least one turn"),
        ("chatty", {}, "prompts is empty"),
        ("chatty", {"messages": [[]]}, "role"),
        ("target", {"messages": CHATS["one"]}, "target: there is no chat template"),
        ("wordless", {"messages": CHATS["one"]}, "wordless has none"),
    ],
)
def test_generate_refuses(chatty, folder, options, words):
    """The call is refused before anything is compiled."""
    loaded = specjax.load(chatty if folder == "chatty" else getattr(folders, folder)())
    before = counted.compilations()
    with pytest.raises(ValueError, match=words):
        specjax.generate(loaded, **options)
    assert counted.compilations() == before


def test_chat_on_the_command_line(chatty, capsys, monkeypatch):
    """The prompt is the user's message, and the answer is printed below it."""
    shared = [
        "--target",
        str(chatty),
        "--proposer",
        "ngram",
        "--max-new-tokens",
        "8",
        "--no-compare",
    ]
    loaded = tabled(chatty)
    monkeypatch.setattr(specjax, "load", lambda folder, *_, **__: loaded)
    text = specjax.generate(loaded, messages=CHATS["one"], max_new_tokens=8, proposer="none").text[
        0
    ]
    main(["generate", CHATS["one"][0]["content"], "--chat", *shared])
    assert capsys.readouterr().out.startswith(f"{CHATS['one'][0]['content']}\n\n{text}")
    main(["generate", CHATS["one"][0]["content"], "--chat", "--json", *shared])
    assert json.loads(capsys.readouterr().out)["text"] == [text]
    monkeypatch.undo()
    with pytest.raises(SystemExit):
        main(["generate", "x", "--chat", "--target", str(folders.target()), *shared[2:]])
    assert "there is no chat template" in capsys.readouterr().err
