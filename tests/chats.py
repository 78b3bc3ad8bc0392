"""Chat templates and conversations, of which `tests/fixtures/transformers.json` has the texts."""

# ruff: noqa: E501 - templates come in one line
import json
import pathlib
import shutil

import folders
import tokenizers

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
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
"""The special tokens that the templates meet."""


def chatty(parent: pathlib.Path) -> pathlib.Path:
    """A folder whose tokenizer adds <|endoftext|> by itself and whose template also writes it."""
    folder = shutil.copytree(folders.target(), parent / "model")
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
