"""Parameters on meshes: what each device holds, and that nothing else changes.

Eight devices need a process of their own.
"""

import subprocess
import sys

import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from several_devices import ROOT, environment
from toys import TRANSFORMERS as toys

import specjax
from specjax.cli import main
from specjax.files.orbax import restore_params, save_params
from specjax.parallel import make_mesh, shardings

_EIGHT = r"""
import contextlib, dataclasses, io, json, pathlib, sys
import jax, numpy as np
import specjax
from specjax.parallel import memory
from specjax.cli import main
from specjax.decoding.decoder import _run
from specjax.files.orbax import restore_params, save_params
from specjax.models.quantised import quantise
from specjax.parallel import RULES, TRAINING_RULES, fitted, make_mesh, shardings

folder, out = map(pathlib.Path, sys.argv[1:])
assert jax.device_count() == 8


def same(actual, wanted):
    assert jax.tree.structure(actual) == jax.tree.structure(wanted)
    arrays = (jax.tree.map(np.asarray, tree) for tree in (actual, wanted))
    jax.tree.map(np.testing.assert_array_equal, *arrays)


def held(leaf):
    return leaf.addressable_shards[0].data.shape


plain = specjax.load(folder)
mesh = make_mesh(data=2)
assert dict(mesh.shape) == {"data": 2, "model": 4}
split = specjax.load(folder, mesh=mesh)
same(split.params, plain.params)

# Hidden size 48, 4 query heads and 2 key heads of 12, MLP size 64, 320 tokens; 4 devices along
# `model`.
layer = split.params["layer_0"]
assert held(split.params["embedding"]) == (80, 48)
assert held(split.params["head"]["kernel"]) == (48, 80)
assert held(layer["attention"]["q"]["kernel"]) == (48, 12)
assert held(layer["attention"]["o"]["kernel"]) == (12, 48)
# Fewer key heads than devices along `model`: each is on two of them.
copied = fitted(mesh, split.model)
assert dict(copied.shape) == {"data": 2, "model": 2, "kv_copies": 2}
assert copied.devices.flatten().tolist() == mesh.devices.flatten().tolist()
assert fitted(copied, split.model) is copied
assert all(fitted(m, split.model) is m for m in (make_mesh(data=4), make_mesh(data=8)))
assert fitted(mesh, split.model, {**RULES, "heads": None}) is mesh
assert held(layer["attention"]["k"]["kernel"]) == (48, 12)
assert held(layer["mlp"]["up"]["kernel"]) == (48, 16)
assert held(layer["mlp"]["down"]["kernel"]) == (16, 48)
assert held(layer["mlp_norm"]["weight"]) == (48,)
planned = shardings(split.model, copied)
for leaf, at in zip(jax.tree.leaves(split.params), jax.tree.leaves(planned), strict=True):
    assert leaf.sharding == at and len(leaf.addressable_shards) == 8
# Rows of a vocabulary that do not divide: the tables are split along the hidden size.
def of_tables(on, rules, size):
    config = dataclasses.replace(split.model.module.config, vocab_size=321, hidden_size=size)
    odd = shardings(specjax.LinenModel(specjax.Transformer(config)), on, rules)
    return odd["embedding"].shard_shape((321, size)), odd["head"]["kernel"].shard_shape((size, 321))


assert of_tables(mesh, RULES, 48) == ((321, 12), (12, 321))
assert of_tables(make_mesh(fsdp=2), TRAINING_RULES, 48) == ((321, 6), (6, 321))
assert of_tables(mesh, RULES, 46) == ((321, 46), (46, 321))

# The text is that of one device, also if the devices do not divide the rows, and whether the model
# or the call names the mesh.
options = {"max_new_tokens": 12, "proposer": specjax.NGram(3, min_ngram=1), "seed": 5}
options |= {"temperature": [1.0, 0.0, 0.7], "repetition_penalty": [1.2, 1.0, 1.1]}
options |= {"num_drafts": [3, 0, 2], "eos": [[], [7], []], "logprobs": 2}
prompts = ["the cat sat on the", "the dog", "that cat sat, that"]
wanted = specjax.generate(plain, prompts, **options)


def compiled():
    return sum(jitted._cache_size() for jitted in _run.jitted())


for model, more in ((split, {}), (split, {}), (plain, {"mesh": mesh})):
    programs = compiled()
    made = specjax.generate(model, prompts, **options, **more)
    assert (made.tokens, made.text, made.finish) == (wanted.tokens, wanted.text, wanted.finish)
    timeless = {"seconds": 0, "compile_seconds": 0}
    counts = [dataclasses.replace(out.stats, **timeless) for out in (made, wanted)]
    assert counts[0] == counts[1]
    for row, other in zip(made.logprobs, wanted.logprobs, strict=True):
        np.testing.assert_allclose(row.raw, other.raw, atol=1e-4)
pieces = list(specjax.generate(split, prompts, **options, stream=True))
assert ["".join(row) for row in zip(*pieces, strict=True)] == wanted.text
assert compiled() == programs, "one program for all pieces and either way onto the mesh"

text = io.StringIO()
command = ["generate", "the dog", "--mesh", "data=2,model=4"]
command += ["--proposer", "draft", "--whole-draft", "--json", "--no-compare"]
with contextlib.redirect_stdout(text):
    main([*command, "--target", str(folder), "--draft", str(folder), "--max-new-tokens", "6"])
told = json.loads(text.getvalue())
assert told["tokens"] == specjax.generate(plain, ["the dog"], max_new_tokens=6).tokens
assert told["stats"]["target_passes"] < 6, "the draft is the target itself"


def refused(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("no ValueError")


decoder = specjax.Decoder(split.model, specjax.NoProposer(), specjax.Match(), (), 16)
three = {"limit": np.full(3, 8), "sampling": specjax.Sampling.create(3)}
three["key"] = jax.random.split(jax.random.key(0), 3)
given = specjax.Params(split.params), np.ones((3, 4), np.int32), np.full(3, 4)
message = refused(lambda: decoder.prefill(*given, **three))
assert "3 rows" in message and "2 devices" in message and "pad to 4 rows" in message, message
# The size of a state on each device is known before it is made.  Caches have one key head there.
settings = {"sampling": specjax.Sampling.create(4), "key": jax.random.split(jax.random.key(0), 4)}
given = specjax.Params(split.params), np.ones((4, 4), np.int32), np.full(4, 4)
state = decoder.prefill(*given, limit=np.full(4, 8), **settings)
assert {held(leaf)[1] for leaf in state.cache.keys} == {1}
size = sum(np.prod(held(leaf), dtype=int) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
assert memory.device_bytes(state, mesh) == size
memory.free_bytes = lambda device: 8 * (size + 4 * 320 * 4 // 8) - 1
message = refused(lambda: decoder.prefill(*given, limit=np.full(4, 8), **settings))
assert "on each of 8 devices, of which" in message, message
memory.free_bytes = lambda device: 8 * (size + 4 * 320 * 4 // 8)
decoder.prefill(*given, limit=np.full(4, 8), **settings)
memory.free_bytes = lambda device: None
elsewhere = specjax.load(folder, mesh=make_mesh(data=8))
message = refused(lambda: specjax.generate(split, "the", draft=elsewhere))
assert "another mesh" in message, message
message = refused(lambda: specjax.generate(quantise(plain), "the", mesh=mesh))
assert "then quantise it" in message, message

# The axes of jax.make_mesh may be explicit.
explicit = (jax.sharding.AxisType.Explicit,) * 2
explicit = jax.make_mesh((2, 4), ("data", "model"), axis_types=explicit)
for model, more in ((specjax.load(folder, mesh=explicit), {}), (plain, {"mesh": explicit})):
    made = specjax.generate(model, prompts, **options, **more)
    assert (made.tokens, made.text) == (wanted.tokens, wanted.text)

# A draft with few key heads on devices of its own.
first, last = (make_mesh(data=1, devices=jax.devices()[n : n + 4]) for n in (0, 4))
apart = {"draft": specjax.load(folder, mesh=last), "draft_mesh": last, "num_drafts": 3}
short = {"max_new_tokens": 8, "temperature": 1.0, "seed": 5}
made = specjax.generate(specjax.load(folder, mesh=first), "the dog", **short, **apart)
assert made.tokens == specjax.generate(plain, "the dog", proposer="none", **short).tokens

# Files do not depend on the mesh.
specjax.save(plain, out / "plain")
specjax.save(split, out / "split")
first, second = ((out / name / "model.safetensors").read_bytes() for name in ("plain", "split"))
assert first == second

# Parameters move from one mesh to another, or to none.
save_params(split.params, out / "orbax")
other = make_mesh(data=4, model=2)
moved = restore_params(out / "orbax", split.model, other)
same(moved, plain.params)
assert held(moved["layer_0"]["attention"]["k"]["kernel"]) == (48, 12)
assert all(leaf.sharding.mesh.shape == other.shape for leaf in jax.tree.leaves(moved))
alone = restore_params(out / "orbax", split.model)
same(alone, plain.params)
assert all(len(leaf.addressable_shards) == 1 for leaf in jax.tree.leaves(alone))

# The mesh must divide a sharded dimension.
wide = make_mesh(model=8)
message = refused(lambda: specjax.load(folder, mesh=wide))
assert "4 heads" in message and "8 devices" in message and "use 4 devices" in message, message
assert "'heads': None" in message, message
copied = specjax.load(folder, mesh=wide, rules={})
assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(copied.params))
whole = shardings(split.model, wide, {**RULES, "heads": None})
assert whole["layer_0"]["attention"]["q"]["kernel"].is_fully_replicated
assert not whole["layer_0"]["mlp"]["up"]["kernel"].is_fully_replicated
print("done")
"""


def test_eight_devices(tmp_path):
    """Each device holds its slice; text, files and Orbax folders are those of one device."""
    folder = folders.write(folders.random_llama(1, initializer_range=0.5), "meshed")
    on_eight("-c", _EIGHT, str(folder), str(tmp_path))


def test_every_mesh():
    """Tokens are those of one device, a step moves no cache and no weights, and buffers are
    reused."""
    on_eight("tests/on_meshes.py")


@pytest.mark.parametrize("options", [(), pytest.param(("--all",), marks=pytest.mark.slow)])
def test_published_drafters_on_every_mesh(options):
    """Tokens are those of one device, and each device holds its share of the drafter."""
    on_eight("tests/drafters_on_meshes.py", *options)


def on_eight(*script: str) -> None:
    done = subprocess.run(
        [sys.executable, *script], capture_output=True, text=True, cwd=ROOT, env=environment(8)
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.parametrize("text", ["data=x", "rows=2", "8", "data=0", ""])
def test_a_mesh_that_cannot_be_read(text, capsys):
    with pytest.raises(SystemExit):
        main(["generate", "the", "--mesh", text])
    assert "must look like data=2,model=4" in capsys.readouterr().err


def test_the_whole_draft_needs_a_mesh(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "the", "--whole-draft"])
    assert "--mesh" in capsys.readouterr().err


def test_a_mesh_of_one():
    """One device is a mesh of one: everything lies on it, and `load` gives the same numbers."""
    mesh = make_mesh()
    assert dict(mesh.shape) == {"data": 1, "model": 1}
    assert all(at.is_fully_replicated for at in jax.tree.leaves(shardings(toys.model(), mesh)))
    meshed, wanted = specjax.load(folders.target(), mesh=mesh), specjax.load(folders.target())
    jax.tree.map(np.testing.assert_array_equal, meshed.params, wanted.params)


@pytest.mark.parametrize(
    "sizes", [{"data": 2}, {"data": 3, "model": 5}, {"model": 2}, {"kv_copies": 2}]
)
def test_a_mesh_of_another_size(sizes):
    """The error names the devices that are there."""
    with pytest.raises(ValueError, match="the number of devices, 1"):
        make_mesh(**sizes)


def test_orbax_round_trip(tmp_path):
    """The round trip is exact, in the dtype of the model."""
    save_params(toys.weights(), tmp_path / "saved")
    restored = restore_params(tmp_path / "saved", toys.model())
    jax.tree.map(np.testing.assert_array_equal, restored, toys.weights())
    rounded = restore_params(tmp_path / "saved", toys.model(dtype=jnp.bfloat16))
    wanted = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), toys.weights())
    jax.tree.map(np.testing.assert_array_equal, rounded, wanted)


def test_orbax_refuses(tmp_path):
    """Another model's parameters, a missing folder and an existing one are refused."""
    save_params(toys.weights(), tmp_path / "saved")
    with pytest.raises(ValueError, match=r"embedding.*\(29, 32\) instead of \(40, 32\)"):
        restore_params(tmp_path / "saved", toys.model(vocab_size=40))
    with pytest.raises(ValueError, match=r"layer_1.*instead of nothing"):
        restore_params(tmp_path / "saved", toys.model(num_layers=1))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        restore_params(tmp_path / "nowhere", toys.model())
    with pytest.raises(ValueError, match="saved"):
        save_params(toys.weights(), tmp_path / "saved")
