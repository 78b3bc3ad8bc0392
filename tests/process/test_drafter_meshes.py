"""`load_drafter` onto a mesh: each device reads its share, and texts are those of one device.

Eight devices need a process of their own.
"""

import subprocess
import sys

import eagle3_folders
import published
import published_target
from eagle3_folders import Head, model_opt, speculators, write
from several_devices import environment
from test_sharding import on_eight

_EIGHT = r"""
import dataclasses, logging, pathlib, sys
import jax, numpy as np
import specjax
from specjax.models import attend, cpu_attend
from specjax.parallel import RULES, make_mesh

folder, eagle, parallel, block = map(pathlib.Path, sys.argv[1:])
assert jax.device_count() == 8
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
)


def held(leaf):
    return leaf.addressable_shards[0].data.shape


def refused(call):
    before = len(compiled)
    try:
        call()
    except ValueError as error:
        assert len(compiled) == before, "a refusal after a compilation"
        return str(error)
    raise AssertionError("no ValueError")


plain = specjax.load(folder)
mesh = make_mesh(data=1, model=4, devices=jax.devices()[:4])
split = specjax.load(folder, mesh=mesh)
# For a kernel XLA would gather the cache.
assert (plain.model.module.attend, split.model.module.attend) == (cpu_attend, attend)
drafter = specjax.load_drafter(eagle, split)

# Hidden size 48, 4 query heads and 2 key heads of 12, MLP size 56, 200 of 320 tokens, three layers
# of the target; 4 devices along `model`.
own = drafter.params
layer = own["network"]["layers_0"]
assert held(own["network"]["fc"]["kernel"]) == (36, 48)
assert held(layer["attention"]["q"]["kernel"]) == (96, 12)
assert held(layer["attention"]["o"]["kernel"]) == (12, 48)
assert held(layer["attention"]["k"]["kernel"]) == (96, 12), "each key head is on two devices"
assert held(layer["mlp"]["up"]["kernel"]) == (48, 14)
assert held(layer["mlp"]["down"]["kernel"]) == (14, 48)
assert held(own["head"]["kernel"]) == (48, 50)
assert held(own["to_draft"]) == (320,)
assert all(len(leaf.addressable_shards) == 4 for leaf in jax.tree.leaves(own))
elsewhere = specjax.load_drafter(eagle, plain)
jax.tree.map(np.testing.assert_array_equal, own, elsewhere.params)
kept = specjax.load_drafter(eagle, split, rules={})
assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(kept.params))
attention = specjax.load_drafter(eagle, split, rules={**RULES, "heads": None}).params["network"][
    "layers_0"]["attention"]
assert all(leaf.is_fully_replicated for name in "qo" for leaf in jax.tree.leaves(attention[name]))
assert held(attention["k"]["kernel"]) == (96, 12), "these rules split key heads"
shared = specjax.load_drafter(parallel, split)
assert held(shared.params["mask_hidden"]) == (144,)

# The texts are those of one device, wherever the drafter was loaded.
options = {"max_new_tokens": 8, "temperature": [0.0, 1.0, 0.7], "seed": 5}
prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
wanted = specjax.generate(plain, prompts, drafter=elsewhere, **options)
moved = plain, elsewhere, {"mesh": mesh}
for target, each, more in ((split, drafter, {}), (split, elsewhere, {}), (split, kept, {}), moved):
    made = specjax.generate(target, prompts, drafter=each, **options, **more)
    assert made.tokens == wanted.tokens, (made.tokens, wanted.tokens)
    timeless = {"seconds": 0, "compile_seconds": 0}
    counts = [dataclasses.replace(out.stats, **timeless) for out in (made, wanted)]
    assert counts[0] == counts[1], counts

# A drafter on another mesh than the target's, or a target that is on none.
other = make_mesh(data=2, model=4)
far = specjax.load(folder, mesh=other)
message = refused(lambda: specjax.generate(far, prompts, drafter=drafter))
assert "the mesh data=1, model=2, kv_copies=2 of the devices 0, 1, 2, 3" in message, message
assert "is on the mesh data=2, model=2, kv_copies=2 of the devices 0 ... 7" in message, message
assert "load the drafter with specjax.load_drafter(path, target) for this target" in message
message = refused(lambda: specjax.generate(plain, prompts, drafter=drafter))
assert "is on no mesh" in message, message

# The mesh must divide the drafter's heads, as it must divide the target's.
wide = make_mesh(model=8)
whole = specjax.load(folder, mesh=wide, rules={**RULES, "heads": None})
message = refused(lambda: specjax.load_drafter(eagle, whole))
assert str(eagle) in message and "has 4 heads" in message and "use 4 devices" in message, message
assert "rules={**RULES, 'heads': None}" in message, message
message = refused(lambda: specjax.generate(whole, prompts, drafter=elsewhere))
assert "the drafter eagle on the mesh data=1, model=8" in message and "4 heads" in message, message
made = specjax.load_drafter(eagle, whole, rules={**RULES, "heads": None})
assert held(made.params["network"]["layers_0"]["attention"]["q"]["kernel"]) == (96, 48)
assert held(made.params["network"]["layers_0"]["mlp"]["up"]["kernel"]) == (48, 7)

# A block draft with a Markov head: its table is read by rows, its matrix as a whole.
net = specjax.TransformerConfig(vocab_size=29, hidden_size=16, mlp_size=24, num_layers=4,
                                num_heads=2, num_kv_heads=1, head_dim=8, max_positions=64)
model = specjax.LinenModel(specjax.Transformer(net))
two = make_mesh(data=1, model=2, devices=jax.devices()[:2])
params = specjax.parallel.sharding.shard_params(model, model.init(jax.random.key(0)), two)
target = specjax.LanguageModel(model, params)
markov = specjax.load_drafter(block, target).params
assert held(markov["draft"]["layer_0"]["mlp"]["down"]["kernel"]) == (12, 16)
assert held(markov["draft"]["fc"]["kernel"]) == (16, 16)
assert held(markov["correction"]["before"]) == (29, 6)
assert held(markov["correction"]["after"]) == (6, 29), "29 tokens do not divide by 2"
print("done")
"""


def test_a_drafter_follows_its_target_onto_a_mesh(tmp_path):
    head = Head()
    eagle = write(tmp_path / "eagle", model_opt(head), head.tensors(1))
    masked = Head(mask_hidden=True)
    config = {**speculators(masked, "peagle"), "mask_token_id": 3}
    parallel = write(tmp_path / "parallel", config, masked.tensors(2))
    assert "dspark_gated" in published.NAMES
    block = published_target.write_fixture(tmp_path / "block", "dspark_gated")
    folders = eagle3_folders.target("llama"), eagle, parallel, block
    on_eight("-c", _EIGHT, *map(str, folders))


_WRITTEN = """
import dataclasses, pathlib, sys
import jax, specjax
from exports import make
from published_target import target

mesh = specjax.make_mesh(model=2)

def split(leaf):
    even = [i for i, size in enumerate(leaf.shape) if size % 2 == 0]
    names = ["model" if i in even[:1] else None for i in range(leaf.ndim)]
    return jax.device_put(leaf, jax.NamedSharding(mesh, jax.P(*names)))

folder = pathlib.Path(sys.argv[1])
there = dataclasses.replace(target(), params=jax.tree.map(split, target().params))
for name in ("eagle3, reduced", "dspark"):
    made = make(name)
    specjax.save_drafter(folder / name / "whole", made, target())
    object.__setattr__(made, "params", jax.tree.map(split, made.params))
    assert not all(leaf.is_fully_replicated for leaf in jax.tree.leaves(made.params))
    specjax.save_drafter(folder / name / "split", made, there)
"""


def test_parameters_on_a_mesh_are_gathered(tmp_path):
    """`save_drafter` writes the file of the same drafter on one device."""
    subprocess.run([sys.executable, "-c", _WRITTEN, tmp_path], env=environment(2), check=True)
    for name in ("eagle3, reduced", "dspark"):
        whole, split = (tmp_path / name / x / "model.safetensors" for x in ("whole", "split"))
        assert whole.read_bytes() == split.read_bytes()
