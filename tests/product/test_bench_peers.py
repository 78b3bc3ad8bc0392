"""Engines in processes of their own: the loop between them, the files they read, their lookup."""

from __future__ import annotations

import pathlib
import sys

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

import specjax
from bench import __main__ as bench
from bench import machine, report
from bench.contestants import ROUNDED, Contestant
from bench.peers import engines, gguf_file
from bench.peers.engines import Engine, Setting, interpreter
from bench.timing import Timed
from specjax.measure import meter

TINY = pathlib.Path(__file__).parents[2] / "checkpoints" / "tiny"
COUNTING = '''
import sys
import numpy as np
from bench.peers.serving import Decoding

class Counting(Decoding):
    """It says 1, 2, 3, ...; with a script it says the script; it fails for 13 tokens."""
    can_impose = True
    def __init__(self, target, draft, dtype, threads, work):
        if dtype == "float16":
            raise ValueError("no float16 here")
        print("engines print where they like")
        self.ways, self.version, self.text = ("plain", "draft"), dtype, None
    def impose(self, text, right):
        assert right.dtype == bool
        self.text = text
    def generate(self, prompts, new, way, num_drafts):
        if new == 13:
            raise RuntimeError("thirteen")
        start = prompts.shape[1]
        said = np.arange(1, new + 1)[None] if self.text is None else self.text[:, start : start + new]
        return np.repeat(said, len(prompts), 0)
'''  # noqa: E501


@pytest.fixture
def setting(tmp_path, monkeypatch):
    (tmp_path / "counting.py").write_text(COUNTING)
    monkeypatch.setattr(engines, "ENGINES", {"counting": ("counting", "Counting")})
    monkeypatch.chdir(tmp_path)
    return lambda **more: Setting(
        **{
            "target": TINY / "target",
            "draft": TINY / "draft",
            "work": tmp_path / "work",
            "python": sys.executable,
            "ways": ("plain", "draft", "ngram"),
            "num_drafts": (2, 4),
            "alone": True,
            "script": None,
            **more,
        }
    )


def names(engine):
    return [(one.library, one.name, one.num_drafts) for one in engine.contestants()]


def test_an_engine_takes_part(setting):
    """It decodes in its ways that were asked for; int8, int4 and batches are plain; a failed call
    is an error with its reason, and the process goes on."""
    engine = Engine("counting", setting(), "float32")
    assert engine.version == "float32"
    assert names(engine) == [("counting", "plain", 0), *(("counting", "draft", n) for n in (2, 4))]
    run = engine.contestants()[1].run
    assert run(np.ones((1, 3), np.int32), 4).tolist() == [[1, 2, 3, 4]]
    with pytest.raises(ValueError, match="RuntimeError: thirteen"):
        run(np.ones((1, 3), np.int32), 13)
    assert run(np.ones((1, 3), np.int32), 2).tolist() == [[1, 2]]
    engine._process.kill()
    with pytest.raises(ValueError, match="its process ended"):
        run(np.ones((1, 3), np.int32), 2)
    engine.close()
    for given, wanted in (
        *(((setting(), precision), name) for precision, name in ROUNDED.items()),
        ((setting(alone=False), "float32"), "plain"),
    ):
        engine = Engine("counting", *given)
        assert names(engine) == [("counting", wanted, 0)]
        engine.close()


def test_an_engine_drafts_what_is_imposed(setting):
    """The script reaches the engine before its first call."""
    script = np.arange(100, 108)[None], np.ones((1, 8), bool)
    engine = Engine("counting", setting(script=script), "float32")
    drafted = engine.contestants()[1]
    assert drafted.run(np.ones((1, 3), np.int32), 4).tolist() == [[103, 104, 105, 106]]
    engine.close()


def test_an_engine_that_cannot_run_is_refused(setting, tmp_path):
    """The message has the engine's reason and the cure."""
    with pytest.raises(ValueError, match=r"counting does not run .*no float16 here.*\[peers\]"):
        Engine("counting", setting(), "float16")
    (tmp_path / "counting.py").write_text("import nothing_of_this_name")
    with pytest.raises(ValueError, match="No module named 'nothing_of_this_name'"):
        Engine("counting", setting(), "float32")
    (tmp_path / "counting.py").write_text("raise SystemExit(3)")
    with pytest.raises(ValueError, match="its process ended"):
        Engine("counting", setting(), "float32")
    with pytest.raises(ValueError, match=r"--engine-python /nowhere is not a file"):
        interpreter("/nowhere")


def test_engines_need_files(monkeypatch):
    """Weights that were drawn on the device are in no file that an engine could read."""
    monkeypatch.setattr(machine, "ceilings", lambda: {"bandwidth": 10.0})
    sizes = "--size tiny --vocab-size 64 --rounds 1 --peers --weights device --engines llama.cpp"
    with pytest.raises(ValueError, match="--weights device writes no files"):
        bench.main(sizes.split())


def test_the_seconds_of_children_are_our_own(setting):
    """A busy child is not another process that disturbs a sample."""
    engine = Engine("counting", setting(), "float32")
    before = meter._of_children()
    assert before > 0.05  # it has imported numpy
    engine.close()


def test_gguf_files_hold_the_weights(tmp_path):
    """Every tensor is there; queries and keys are in the order in which llama.cpp rotates."""
    path = tmp_path / "tiny.gguf"
    gguf_file.write(TINY / "target", path, "float32")
    read = gguf.GGUFReader(path)
    found = {tensor.name: tensor.data for tensor in read.tensors}
    weights = load_file(TINY / "target" / "model.safetensors")
    assert len(found) == len(weights)
    config = specjax.load(TINY / "target").model.module.config
    np.testing.assert_array_equal(
        found["blk.1.ffn_down.weight"], weights["model.layers.1.mlp.down_proj.weight"]
    )
    query = weights["model.layers.0.self_attn.q_proj.weight"]
    by_head = query.reshape(config.num_heads, config.head_dim, -1)
    pairs = found["blk.0.attn_q.weight"].reshape(config.num_heads, config.head_dim // 2, 2, -1)
    np.testing.assert_array_equal(pairs[:, :, 0], by_head[:, : config.head_dim // 2])
    np.testing.assert_array_equal(pairs[:, :, 1], by_head[:, config.head_dim // 2 :])
    for precision, kind in (("int8", "Q8_0"), ("int4", "Q4_0")):
        small = tmp_path / f"{precision}.gguf"
        gguf_file.write(TINY.parent / "pycode" / "target", small, precision)
        kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(small).tensors}
        assert kinds["output_norm.weight"] == "F32" and kinds["blk.0.ffn_up.weight"] == kind
        assert kinds["blk.0.ffn_down.weight"] == "F16"  # 688 is no multiple of 32


def test_other_families_are_not_written(tmp_path):
    """A file that llama.cpp would read as another model is not written."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ValueError, match=r"a qwen3 model .* is not written as GGUF"):
        gguf_file.write(tmp_path, tmp_path / "x.gguf", "float32")


def timed(library, name, num_drafts, samples):
    contestant = Contestant(name, library, num_drafts, lambda *_: np.ones((1, 1), np.int32))
    made = Timed(contestant, [np.ones((1, 1), np.int32)] * len(samples), 1)
    made.seconds = samples
    return made


def test_a_row_names_its_strongest_peer():
    """The fastest one that decodes in the same way, a compiled one included."""
    mine = timed("specjax", "plain", 0, [[2.0, 2.0], [2.0, 2.2]])
    peers = [
        timed("transformers", "plain", 0, [[8.0, 8.0], [8.0, 8.0]]),
        timed("transformers", "plain compiled", 0, [[6.0, 6.0], [6.0, 6.0]]),
        timed("openvino", "draft", 4, [[1.0, 1.0], [1.0, 1.0]]),
        timed("llama.cpp", "plain", 0, [[], [1.0]]),  # without a clean sample
    ]
    row = report._beside_peers(mine, [mine, *peers])
    assert row["peer"] == "transformers"
    assert row["over_peer"][0] == pytest.approx(12 / 4.1)
    assert report._beside_peers(mine, [mine]) == {}


def test_ratios_have_intervals():
    """Over items; of a single item over its samples, whose interval is within their range."""
    assert report.ratio([[4.0], [2.0]], [[1.0], [1.0]]) == (3.0, 2.0, 4.0)
    value, low, high = report.ratio([[2.0, 3.0, 4.0]], [[1.0, 1.0, 1.0]])
    assert value == 3.0 and 2.0 <= low < value < high <= 4.0
