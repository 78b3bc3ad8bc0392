"""Chat templates are programs of strangers: their time, memory and text have bounds."""

import concurrent.futures
import os
import pathlib
import signal

import pytest

from specjax.text import chat, render, sandbox

CHAT = [{"role": "user", "content": "the cat"}]
HONEST = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def show(template, messages=CHAT, **variables):
    return render({"chat_template.jinja": template.encode()}, messages, **variables)


@pytest.fixture
def brief(monkeypatch):
    """A short bound on processor time."""
    monkeypatch.setitem(sandbox.SECONDS, "templates", 0.9)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 10 ** 100000000 }}", "more than 0.9 s"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "0.9 s"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "recursion"),
        ("{{ 'a' * 10 ** 10 }}", "more than 1 GiB"),
        ("{{ '%9999999999d' % 1 }}", "GiB|too large|too big"),
        ("{{ 'a' * (2 ** 24 + 1) }}", "16777217 characters, and 16777216 are allowed"),
        ("{{ 2 ** 100000000 }}", "4300 digits|0.9 s"),
        ("{{" + "(" * 10**5, "damaged"),
        ("{{ " + "[" * 500 + "]" * 500 + " }}", "damaged"),
    ],
)
def test_no_template_runs_on(brief, template, words):
    """The error names the file and the cure, and the next template is rendered as ever."""
    with pytest.raises(ValueError, match=words) as caught:
        show(template)
    assert "the chat template (chat_template.jinja)" in str(caught.value)
    assert "pass the whole prompt as text" in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert show(HONEST) == "<user>the cat"


def test_a_refused_request_costs_one_child(brief):
    """A child that ended is replaced once, and kept after that."""
    with pytest.raises(ValueError, match="processor time"):
        show("{{ 10 ** 100000000 }}")
    show(HONEST)
    first = sandbox._children["templates"].process.pid
    assert [show(HONEST) for _ in range(5)] == ["<user>the cat"] * 5
    assert sandbox._children["templates"].process.pid == first


def test_a_child_that_was_ended_from_outside():
    """The next request starts another."""
    show(HONEST)
    child = sandbox._children["templates"].process
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert show(HONEST) == "<user>the cat"


def test_a_child_that_gets_no_processor_time(monkeypatch):
    """The error says that the machine may be busy: nothing is wrong with the template."""
    show(HONEST)
    os.kill(sandbox._children["templates"].process.pid, signal.SIGSTOP)
    monkeypatch.setattr(sandbox, "_patience", lambda seconds: 0.1)
    with pytest.raises(ValueError, match=r"not done after 0\.1 s: try again when this machine is"):
        show(HONEST)
    monkeypatch.undo()
    assert show(HONEST) == "<user>the cat"


def test_threads_share_a_child():
    """Every thread gets its own text."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        chats = [[{"role": "user", "content": str(n)}] for n in range(64)]
        texts = list(pool.map(lambda messages: show(HONEST, messages), chats))
    assert texts == [f"<user>{n}" for n in range(64)]


def test_an_interrupt_leaves_no_answer_behind(monkeypatch):
    """The answer to an interrupted request is not given to the next."""
    show(HONEST)
    asked = sandbox._Child.ask

    def interrupted(self, seconds, request):
        asked(self, seconds, request)
        raise KeyboardInterrupt

    monkeypatch.setattr(sandbox._Child, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        show("first")
    monkeypatch.setattr(sandbox._Child, "ask", asked)
    assert show("second") == "second"


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, 1j, b"x", float, 10**5000], ids=lambda value: type(value).__name__
)
def test_a_variable_that_is_no_json(value):
    """It cannot be sent, and the error says what can."""
    with pytest.raises(ValueError, match=r"cannot be written as JSON .*pass texts, numbers"):
        show("x", enable_thinking=value)


def test_values_of_json_arrive_as_they_are():
    """Also NaN, half of a surrogate pair, and numbers of other libraries."""
    numpy = pytest.importorskip("numpy")
    assert show("{{ a }} {{ b[1] }} {{ c | length }} {{ d + 1 }} {{ e is none }}", a=float("nan"),
                b=(1, 2.5), c="\ud800", d=numpy.int64(2), e=None) == "nan 2.5 1 3 True"  # fmt: skip


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer_config.json": b'{"chat_template": 5}'}, "chat_template in tokenizer_config"),
        ({"tokenizer_config.json": b'{"chat_template": [{"name": 1}]}'}, "a name and a template"),
        ({"tokenizer_config.json": b"[" * 10**5}, "tokenizer_config.json is not JSON"),
        ({"tokenizer_config.json": b'{"chat_template": "x", "bos_token": 5}'}, "bos_token in"),
        ({"chat_template.jinja": b"x", "special_tokens_map.json": b'{"eos_token": {}}'}, "eos_tok"),
        ({"chat_template.jinja": b"\xff"}, "chat_template.jinja is not UTF-8"),
    ],
)  # fmt: skip
def test_files_of_another_kind(files, words):
    """Each error names the file and the field."""
    with pytest.raises(ValueError, match=words):
        render(files, CHAT)


def test_nothing_is_read_and_nothing_written(tmp_path):
    """A template that breaks out of the sandbox still cannot open a file: its process may not."""
    show(HONEST)
    limits = f"/proc/{sandbox._children['templates'].process.pid}/limits"
    if not os.path.exists(limits):
        pytest.skip("the system has no /proc")
    rows = pathlib.Path(limits).read_text()
    assert any(row.split()[:4] == ["Max", "file", "size", "0"] for row in rows.splitlines())
    opened = len(os.listdir(f"/proc/{sandbox._children['templates'].process.pid}/fd"))
    most = next(row.split()[3] for row in rows.splitlines() if row.startswith("Max open files"))
    assert int(most) <= opened + 2
    assert chat.LONGEST == 2**24
