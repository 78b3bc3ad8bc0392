"""What training on eight devices must be, for `tests/test_train_meshes.py`:  python tests/train_on_meshes.py FOLDER

A process of its own, since a process has the devices that it starts with.  Every job runs a few steps on one device and
on a mesh with all three axes; a run that was saved on one mesh goes on on another.
"""

import json
import pathlib
import sys

import jax
import numpy as np

from train import distill, medusa, pretrain
from train.mesh import lay_batch, mesh_of_run

STEPS = ("--steps", "4", "--eval-every", "4", "--log-every", "1", "--warmup-steps", "1", "--batch-size", "8")
SIZES = ("--hidden-size", "16", "--mlp-size", "32", "--num-layers", "1", "--num-heads", "2", "--num-kv-heads", "1")
EVAL = ("--sequence-length", "32", "--eval-batches", "1")
TOLERANCE = 1e-4
"""Relative, of a loss: its sums are taken in another order.  (Seen here: 2e-7, half of it rounding.)"""

MESH = "data=2,fsdp=2,model=2"


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def same(found, wanted):
    found, wanted = metrics(found), metrics(wanted)
    assert [set(line) for line in found] == [set(line) for line in wanted]
    for line, other in zip(found, wanted, strict=True):
        for name in line:
            if "loss" in name or name in ("step", "grad_norm", "held_out_kl"):
                np.testing.assert_allclose(
                    line[name], other[name], rtol=TOLERANCE, atol=2e-6, err_msg=f"{name} of {other}"
                )


def main(folder: str) -> None:
    assert jax.device_count() == 8
    out = pathlib.Path(folder)
    text = out / "text"
    text.mkdir()
    for path in sorted(pathlib.Path(pretrain.__file__).parent.glob("[a-d]*.py")):
        (text / path.name).write_text(path.read_text())
    common = ("--data", str(text), *STEPS, *EVAL)

    # The same text, options and losses, whatever the devices.
    language = (*common, *SIZES, "--vocab-size", "300")
    pretrain.main([*language, "--out", str(out / "one")])
    pretrain.main([*language, "--out", str(out / "mesh"), "--mesh", MESH, "--stop-at", "2"])
    pretrain.main([*language, "--out", str(out / "mesh"), "--mesh", "fsdp=8", "--accumulate", "1"])
    same(out / "mesh", out / "one")

    target = ("--target", str(out / "one" / "model"))
    draft = (*common, *target, *SIZES, "--sampled-sequences", "8", "--sampled-prompt", "8", "--eval-prompts", "3")
    draft = (*draft, "--eval-tokens", "4", "--num-drafts", "2")
    heads = (*common, *target, "--num-heads", "2", "--written-sequences", "3", "--written-prompt", "8", "--own-heads")
    for name, job, options in (("draft", distill, draft), ("heads", medusa, heads)):
        job.main([*options, "--out", str(out / f"{name}-one")])
        job.main([*options, "--out", str(out / f"{name}-mesh"), "--mesh", MESH])
        same(out / f"{name}-mesh", out / f"{name}-one")

    # What each device holds: a part of every matrix and of what the optimizer keeps of it; its rows.
    options = pretrain.PretrainOptions(data=(), mesh=MESH, batch_size=8, sequence_length=32, hidden_size=16)
    mesh = mesh_of_run(options)
    job = pretrain.Pretrain(options, pretrain.make_model(options, 300), None, None, mesh=mesh)  # pyright: ignore
    params = job.init()
    held = {jax.tree_util.keystr(p): x.addressable_shards[0].data.size / x.size for p, x in _leaves(params)}
    assert held["['embedding']"] == held["['layer_0']['attention']['q']['kernel']"] == 1 / 4, held
    assert held["['layer_0']['mlp']['down']['kernel']"] == 1 / 4 and held["['norm']['weight']"] == 1 / 2, held
    batch = lay_batch(np.zeros((8, 33)), mesh)
    assert batch.addressable_shards[0].data.shape == (2, 33)
    sys.__stdout__.write("done\n")


def _leaves(tree):
    return jax.tree_util.tree_leaves_with_path(tree)


if __name__ == "__main__":
    sys.stdout = sys.stderr  # jobs say what they do
    main(*sys.argv[1:])
