"""Chat templates: text and token ids equal those of transformers' apply_chat_template."""

# ruff: noqa: E501 - templates come in one line
import dataclasses
import datetime
import json
import shutil
import sys

import counted
import folders
import pytest
import tokenizers
import transformers

import specjax
from specjax.commands import main
from specjax.text.chat import render

TEMPLATES = {
    "chatml": """{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "llama3": """
{%- set loop_messages = messages %}
{%- for message in loop_messages %}
    {%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}
    {%- if loop.index0 == 0 %}
        {%- set content = bos_token + content %}
    {%- endif %}
    {{- content }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
""",
    "gemma": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}""",
    "llama2": """{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{% for message in rest %}{% if loop.index0 == 0 and system != false %}{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}""",
    # What newer templates use: macros, namespaces, loop controls, JSON, dates, training marks,
    # optional tools.
    "features": """
{% macro turn(role, text) %}
<{{ role }}>{{ text }}
{% endmacro %}
{% set ns = namespace(seen=0) %}
{% if tools is none or not tools %}no tools{% endif %}

{% if date is not defined %}{% set date = strftime_now("%Y") %}{% endif %}
{{ date }} {{ {"a": "<b> & 'ü'", "n": [1, 2.5, none, true]} | tojson }}
{% for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
    {% set ns.seen = ns.seen + 1 %}
    {% if message.role == 'assistant' %}
        {% generation %}
{{ turn('model', message.content) }}
        {% endgeneration %}
    {% else %}
{{ turn('you', message['content'] | upper) }}
    {% endif %}
    {% if ns.seen > 3 %}{% break %}{% endif %}
{% endfor %}
{{ dict(x=1) | tojson(indent=2) }}
{% if add_generation_prompt %}{{ pad_token or eos_token }}{% endif %}
""",
}
CHATS = {
    "one": [{"role": "user", "content": " the cat sat "}],
    "turns": [
        {"role": "user", "content": "the cat?"},
        {"role": "assistant", "content": 'on the <mat> & "hat"\'s ü'},
        {"role": "user", "content": "{{ messages }} {% raw %} the dog?\n"},
    ],
    "system": [{"role": "system", "content": "be a rat"}, {"role": "user", "content": "and?"}],
}


def files(template, **config):
    return {"tokenizer_config.json": json.dumps({"chat_template": template, **config}).encode()}


def theirs(template, **special):
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folders.tokenizer_file()), chat_template=template, **special
    )


@pytest.mark.parametrize("prompt", [True, False], ids=["open", "closed"])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_text_is_that_of_transformers(name, chat, prompt):
    """The text is equal; where the template refuses a conversation, both raise its message."""
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    template = theirs(TEMPLATES[name], **special)
    if name == "gemma" and chat == "system":
        with pytest.raises(ValueError, match="System role not supported"):
            render(files(TEMPLATES[name], **special), CHATS[chat])
        return
    wanted = template.apply_chat_template(CHATS[chat], tokenize=False, add_generation_prompt=prompt)
    ours = render(files(TEMPLATES[name], **special), CHATS[chat], add_generation_prompt=prompt)
    assert ours == wanted
    assert "strftime_now" not in TEMPLATES[name] or str(datetime.date.today().year) in ours


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


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """A folder whose tokenizer adds <|endoftext|> by itself and whose template also writes it."""
    folder = shutil.copytree(folders.target(), tmp_path_factory.mktemp("chat") / "model")
    made = folders.tokenizer()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{folders.END} $A", special_tokens=[(folders.END, 0)]
    )
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": folders.END, "eos_token": folders.END})
    )
    (folder / "chat_template.jinja").write_text(TEMPLATES["llama3"])
    return folder


def test_ids_are_those_of_transformers(chatty):
    """No special token is added to those that the template has written."""
    loaded = specjax.load(chatty)
    wanted = transformers.AutoTokenizer.from_pretrained(chatty).apply_chat_template(
        CHATS["turns"], add_generation_prompt=True, return_dict=False
    )
    assert wanted[0] == 0 != wanted[1]
    options = {"max_new_tokens": 8, "temperature": 1.0}
    out = specjax.generate(loaded, messages=CHATS["turns"], **options)
    assert out.tokens == specjax.generate(loaded, [wanted], **options).tokens
    both = specjax.generate(loaded, messages=[CHATS["turns"], CHATS["one"]], seed=[0, 1], **options)
    assert len(both.text) == 2
    assert (
        both.tokens[0]
        == specjax.generate(loaded, messages=[CHATS["turns"]], seed=[0], **options).tokens[0]
    )


def test_one_conversation_streams_strings(chatty):
    """One conversation streams strings, as one prompt does; a list of conversations streams
    lists."""
    loaded = specjax.load(chatty)
    pieces = specjax.generate(loaded, messages=CHATS["one"], max_new_tokens=8, stream=True)
    assert all(isinstance(piece, str) for piece in pieces)
    pieces = specjax.generate(loaded, messages=[CHATS["one"]], max_new_tokens=8, stream=True)
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
        ("chatty", {"messages": []}, "messages is empty"),
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


def test_chat_on_the_command_line(chatty, capsys):
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
    text = specjax.generate(specjax.load(chatty), messages=CHATS["one"], max_new_tokens=8).text[0]
    main(["generate", CHATS["one"][0]["content"], "--chat", *shared])
    assert capsys.readouterr().out.startswith(f"{CHATS['one'][0]['content']}\n\n{text}")
    main(["generate", CHATS["one"][0]["content"], "--chat", "--json", *shared])
    assert json.loads(capsys.readouterr().out)["text"] == [text]
    with pytest.raises(SystemExit):
        main(["generate", "x", "--chat", "--target", str(folders.target()), *shared[2:]])
    assert "there is no chat template" in capsys.readouterr().err
