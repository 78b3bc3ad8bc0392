"""What only a process of its own shows: its modules, its streams, its types, and its children."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys

import eagle3_folders
import pytest
import torch
from command_line import PAIR, ROOT, SHORT, run
from eagle3_cases import target

import specjax
from specjax.text import render, sandbox

HONEST = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def show(template):
    return render(
        {"chat_template.jinja": template.encode()}, [{"role": "user", "content": "the cat"}]
    )


def test_python_m_specjax():
    """The module runs, and shows no progress on a stderr that is not a terminal."""
    command = [
        sys.executable,
        "-m",
        "specjax",
        "generate",
        "x",
        *PAIR,
        *SHORT,
        "--json",
        "--no-compare",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["tokens"][0]) <= 24


def test_a_second_process_finds_the_programs(tmp_path):
    """In the user's cache; its text is the same, and it traces and compiles no program."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
    environ |= {"XDG_CACHE_HOME": str(tmp_path), "JAX_LOG_COMPILES": "1"}
    command = [sys.executable, "-m", "specjax", "generate", "x", *PAIR, *SHORT, "--json"]
    texts, found, compiled = [], [], []
    for _ in range(2):
        done = subprocess.run(
            [*command, "--no-compare"], capture_output=True, text=True, cwd=ROOT, env=environ
        )
        assert done.returncode == 0, done.stderr
        compiled.append(done.stderr.count("Finished XLA compilation"))
        texts.append(json.loads(done.stdout)["tokens"])
        found.append({path.name for path in tmp_path.rglob("*") if path.is_file()})
    assert texts[0] == texts[1] and found[0] == found[1]
    assert any("program-_run" in name for name in found[0])
    assert 3 <= compiled[0] <= 5 and compiled[1] == 0


def test_x64_changes_no_token(capsys):
    """With JAX's 64-bit types the same key gives the same text."""
    arguments = [
        "generate",
        "import os\n",
        *PAIR,
        *SHORT,
        "--temperature",
        "1",
        "--json",
        "--no-compare",
    ]
    environment = {**os.environ, "JAX_ENABLE_X64": "1"}
    command = [sys.executable, "-m", "specjax", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] == json.loads(run(capsys, *arguments).out)["tokens"]


def test_closed_streams():
    """`>&-` and `2>&-` are as good as /dev/null, for a command and for a job; in one shell, since
    a process starts with them."""
    generate = [sys.executable, "-m", "specjax", "generate", "x", *PAIR, "--max-new-tokens", "2"]
    job = [sys.executable, "-m", "train.prompts", "--data", "nowhere", "--out", "x"]
    lines = [
        f"{' '.join(generate)} --json --no-compare 0<&- >&- 2>&-",
        "echo $?",
        f"{' '.join(job)} >&-",
        "echo $?",
        f"{' '.join(job)} 2>&-",
        "echo $?",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.stdout.split() == ["0", "2", "2"], done
    assert done.stderr.endswith("--data: nowhere does not exist\n"), done.stderr
    assert done.stderr.count("\n") == 1


def test_nnx_is_imported_when_it_is_asked_for():
    """Neither specjax nor Linen imports `flax.nnx`."""
    code = (
        "import sys, specjax; specjax.generate; "
        "assert 'flax.linen' in sys.modules; assert 'flax.nnx' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_the_library_imports_no_training():
    """Nor does it import what only training, the Hub, templates and Orbax checkpoints need."""
    code = "import specjax, specjax.cli, sys; specjax.generate; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    imported = set(done.stdout.split())
    assert "specjax.decoding.decoder" in imported
    assert not imported & {
        "optax",
        "orbax",
        "huggingface_hub",
        "jinja2",
        "torch",
        "transformers",
        "specjax.training",
    }


def test_training_on_text_imports_few_modules(tmp_path):
    """Until its first step a job imports no format, decoder or kernel that it does not use."""
    text = tmp_path / "text.txt"
    text.write_text("The cat sat on the mat, and the dog slept beside the door. " * 200)
    code = (
        "import sys\n"
        "from specjax.training.jobs import distill\n"
        "def fit(*arguments, **options):\n"
        "    print(*(n for n in sys.modules if n.split('.')[0] in ('specjax', 'train')))\n"
        "    raise SystemExit\n"
        "distill.fit = fit\n"
        "distill.main()\n"
    )
    options = (
        f"--target checkpoints/tiny/target --data {text} --sampled-fraction 0 --steps 1 "
        f"--sequence-length 64 --batch-size 1 --out {tmp_path / 'out'}"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *options.split()], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.splitlines()[-1].split())
    assert "specjax.training.jobs.distill" in imported
    assert len(imported) <= 120, sorted(imported)


def test_a_job_has_two_doors():
    """`specjax train JOB` and `python -m train.JOB` answer alike, but for their names."""
    doors = [("-m", "specjax", "train", "distill"), ("-m", "train.distill")]
    said = [
        subprocess.run([sys.executable, *door, "--clip", "0"], capture_output=True, text=True)
        for door in doors
    ]
    assert [done.returncode for done in said] == [2, 2]
    ends = [done.stderr.splitlines()[-1].partition("error:")[2] for done in said]
    assert ends[0] == ends[1] != ""


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_process_has_a_child_of_its_own():
    """Even if another thread holds the lock when the process is forked."""
    show(HONEST)
    with sandbox._lock, multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(show, (HONEST,)).get(60) == "<user>the cat"
    assert show(HONEST) == "<user>the cat"


def test_the_way_to_convert_works(tmp_path):
    """The command in the error writes safetensors that load."""
    head = eagle3_folders.Head()
    tensors = head.tensors(0, midlayer=True)
    folder = eagle3_folders.write(tmp_path / "head", eagle3_folders.authors(head), tensors)
    torch.save({n: torch.from_numpy(x) for n, x in tensors.items()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError) as caught:
        specjax.load_drafter(folder, target("llama"))
    command = str(caught.value).split('python -c "')[1].removesuffix('"')
    subprocess.run([sys.executable, "-c", command], check=True)
    assert specjax.load_drafter(folder, target("llama")).name == "head"
