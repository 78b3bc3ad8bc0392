"""Cases of chat templates: honest ones that were damaged, and programs made of hostile pieces."""

# ruff: noqa: E501 - templates come in one line

from __future__ import annotations

import json
import pathlib
import random

from specjax.text import render, sandbox
from tests.fuzz import values
from tests.fuzz.law import Case

_MESSAGES = [
    [{"role": "user", "content": "the cat"}],
    [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": None}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    [{"role": "user", "content": "{{ 1 }} \ud800 \x00"}],
]  # fmt: skip
_HONEST = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}{% for m in messages %}{{ m['content'] | trim + eos_token }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% macro turn(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% generation %}{{ turn(m) }}{% endgeneration %}{% if ns.n > 3 %}{% break %}{% endif %}{% endfor %}{{ {'a': 1} | tojson(indent=2) }}{{ strftime_now('%Y') }}",
)
_ATOMS = (
    "1", "0", "-1", "2.5", "10**9", "'a'", "''", "messages", "messages[0]", "messages[0].content",
    "bos_token", "none", "true", "undefined_name", "[]", "[1, 2]", "{'a': 1}", "range(99999)", "loop",
    "self", "namespace()", "cycler('a')", "joiner()", "lipsum", "dict", "''.__class__", "range",
    "messages.append", "raise_exception", "strftime_now('%s' * 99)", "caller", "varargs", "(1, 2)",
    "''.join", "'%s'.format", "tools", "().__class__.__base__", "lipsum.__globals__", "x",
)  # fmt: skip
_BINARY = (
    "+",
    "-",
    "*",
    "/",
    "//",
    "%",
    "**",
    "~",
    "in",
    "and",
    "or",
    "==",
    "<",
    "is",
    "if x else",
    ".",
    "|",
)
_FILTERS = (
    "tojson", "tojson(indent=9)", "upper", "trim", "length", "join", "join(',')", "list", "sum", "sort",
    "first", "last", "int", "float", "string", "batch(3)", "slice(2)", "center(9)", "indent(4)",
    "replace('a', 'aa')", "format(1)", "map('upper')", "map(attribute='x')", "selectattr('role')", "xmlattr",
    "urlize", "wordwrap(1)", "round(2)", "groupby('role')", "attr('__class__')", "unique", "pprint",
    "truncate(3)", "filesizeformat", "default('x')", "items", "safe", "escape", "nofilter", "random",
)  # fmt: skip
_HEAVY = (
    "{{ 2**100000000 }}", "{{ 10**100000000 }}", "{{ 'a' * 10**9 }}", "{{ 'a'.ljust(10**10) }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "{{ '%999999999d' % 1 }}", "{{ lipsum(n=10**7) }}",
    "{{ [0] * 10**10 }}", "{{ 'a' | center(10**10) }}", "{{ {'a': 1} | tojson(indent=10**10) }}",
    "{{ (" * 3000, "{% if 1 %}" * 3000, "{{ '{:999999999}'.format(1) }}", "{{ range(99999) | list * 10**6 }}",
    "{{ ('a' * 99999 + 'b') | urlize }}", "{% for x in messages recursive %}{{ loop([x, x]) }}{% endfor %}",
)  # fmt: skip


def _expression(rng: random.Random, depth: int = 3) -> str:
    kind = rng.random()
    if depth == 0 or kind < 0.3:
        return rng.choice(_ATOMS)
    inner = _expression(rng, depth - 1)
    if kind < 0.55:
        return f"{inner} {rng.choice(_BINARY)} {_expression(rng, depth - 1)}"
    if kind < 0.8:
        return f"({inner}) | {rng.choice(_FILTERS)}"
    if kind < 0.9:
        return f"({inner})[{_expression(rng, depth - 1)}]"
    return f"({inner})({_expression(rng, depth - 1)})"


def _program(rng: random.Random, depth: int = 2) -> str:
    pieces = []
    for _ in range(rng.randrange(1, 4)):
        e, kind = _expression(rng), rng.random()
        inner = _program(rng, depth - 1) if depth else "x"
        if kind < 0.5:
            pieces.append("{{ " + e + " }}")
        elif kind < 0.6:
            pieces.append("{% set x = " + e + " %}")
        elif kind < 0.75:
            pieces.append(
                "{% for x in "
                + e
                + " %}"
                + inner
                + "{% break %}" * (rng.random() < 0.7)
                + "{% endfor %}"
            )
        elif kind < 0.85:
            pieces.append("{% if " + e + " %}" + inner + "{% endif %}")
        elif kind < 0.9:
            pieces.append("{% macro x(a) %}" + inner + "{% endmacro %}{{ x(" + e + ") }}")
        else:
            pieces.append(rng.choice(("{% include '/etc/passwd' %}", "{% import 'os' as x %}", "{% extends x %}", "{% block x %}{% endblock %}", "{% call x() %}{% endcall %}", "{% filter upper %}x{% endfilter %}", "{% raw %}{{{% endraw %}", "{#", "{%", "{% generation %}x{% endgeneration %}", "{% continue %}", "{% autoescape x %}{% endautoescape %}", "{% with a = " + e + " %}{{ a }}{% endwith %}")))  # fmt: skip
    return "".join(pieces)


class Templates:
    """Templates in each of their files, with messages that are honest or not."""

    def __init__(self, root: pathlib.Path) -> None:
        # The bound itself is tested elsewhere; here many templates reach it.
        sandbox.SECONDS["templates"] = 0.5

    def case(self, rng: random.Random) -> Case:
        kind = rng.random()
        source = rng.choice(_HONEST)
        if kind < 0.4:
            at, cut = rng.randrange(len(source)), rng.randrange(9)
            source = (
                source[:at]
                + rng.choice(("", "{{", "%}", "'", "|", "(", "é", " x "))
                + source[at + cut :]
            )
        elif kind < 0.985:
            source = _program(rng)
        elif kind < 0.99:
            source = rng.choice(_HEAVY)
        files = {"chat_template.jinja": source.encode()}
        if rng.random() < 0.2:
            named = [{"name": "default", "template": source}]
            config = {"chat_template": rng.choice((source, named, values.some(rng))), "bos_token": rng.choice(("<s>", {"content": "<s>"}, values.some(rng)))}  # fmt: skip
            files = {"tokenizer_config.json": values.text_of(rng, config)}
        elif rng.random() < 0.02:
            files = {"chat_template.jinja": rng.randbytes(40)}
        elif rng.random() < 0.05:
            files["special_tokens_map.json"] = json.dumps({"eos_token": values.some(rng)}).encode()
        messages = rng.choice(_MESSAGES)
        if rng.random() < 0.1:
            messages = values.changed(rng, messages)
        more = {"enable_thinking": values.some(rng)} if rng.random() < 0.1 else {}
        names = (
            "chat template",
            "messages=",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "chat_template.jinja",
        )

        def check(text: object) -> None:
            assert isinstance(text, str), "the text is no string"

        return Case(lambda: render(files, messages, **more), names, check)
