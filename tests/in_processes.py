"""Run as one of two processes with two devices each, for `tests/process/test_processes.py`:

python tests/in_processes.py OUT TEXT HOST:PORT ID

It repeats what one process with one device did before: every job of the trainer on meshes of all
four devices, and `specjax.generate`. It reports the results on stdout and then trains until it is
killed.
"""

import json
import sys

import jax
import numpy as np

import specjax
from specjax.options.command import run
from specjax.parallel.sharding import TRAINING_RULES, mesh_of
from specjax.training.jobs import distill, drafter, medusa, pretrain
from specjax.training.lora import initial_lora
from specjax.training.mesh import lay_batch

MESH = {"fsdp": 2, "model": 2}
SIZES = (
    "--hidden-size",
    "16",
    "--mlp-size",
    "32",
    "--num-layers",
    "1",
    "--num-heads",
    "2",
    "--num-kv-heads",
    "1",
)
COMMON = ("--sequence-length", "32", "--eval-batches", "1", "--eval-every", "4", "--log-every", "1",
          "--batch-size", "4", "--warmup-steps", "1")  # fmt: skip
LANGUAGE = (
    *COMMON,
    *SIZES,
    "--vocab-size",
    "300",
    "--decay-fraction",
    "0",
    "--save-every",
    "2",
    "--steps",
    "100000",
)
DRAFT = (
    *COMMON,
    *SIZES,
    "--steps",
    "4",
    "--sampled-sequences",
    "8",
    "--sampled-batch",
    "8",
    "--sampled-prompt",
    "8",
)
HEADS = (*COMMON, "--steps", "4", "--num-heads", "1", "--own-heads", "--lora-rank", "2",
         "--written-sequences", "3", "--written-prompt", "8")  # fmt: skip
READER = (*COMMON, "--kind", "dspark", "--steps", "4", "--num-drafts", "3", "--num-layers", "1",
          "--mlp-size", "32", "--taps", "0", "1", "--markov-rank", "4", "--anchors", "6",
          "--sampled-prompt", "8")  # fmt: skip
PROMPTS = ["import os", "def f(", "the values of the values"]
DECODED = {
    "proposer": specjax.NGram(3, min_ngram=1),
    "max_new_tokens": 8,
    "temperature": [1.0, 0.0, 0.7],
}


def main() -> None:
    out, text, coordinator, number = sys.argv[1:]
    joined = ["--coordinator", coordinator, "--num-processes", "2", "--process-id", number]
    given = ["--data", text, "--target", f"{out}/one/best"]
    mesh = ",".join(f"{axis}={size}" for axis, size in MESH.items())
    distill.main([*given, *DRAFT, "--out", f"{out}/draft-two", "--mesh", "data=2,fsdp=2", *joined])
    medusa.main([*given, *HEADS, "--out", f"{out}/heads-two", "--mesh", mesh])
    medusa.main([*given, *HEADS, "--out", f"{out}/heads-two", "--show-mask"])
    drafter.main([*given, *READER, "--out", f"{out}/reader-two", "--mesh", mesh])

    model = specjax.load(f"{out}/one/best", mesh=specjax.make_mesh(**MESH), rules=TRAINING_RULES)
    check_parts(model)
    specjax.save(model, f"{out}/saved")
    model = specjax.load(f"{out}/one/best", mesh=specjax.make_mesh(data=2))
    print(json.dumps(specjax.generate(model, PROMPTS, **DECODED).tokens), flush=True)
    pretrain.main(["--data", text, *LANGUAGE, "--out", f"{out}/two", "--mesh", mesh])


def check_parts(model: specjax.LanguageModel) -> None:
    """Check that each device holds a part of every matrix, of its update, and of a batch."""

    def held(arrays):
        leaves = jax.tree_util.tree_leaves_with_path(arrays)
        return {
            jax.tree_util.keystr(p): x.addressable_shards[0].data.size / x.size for p, x in leaves
        }

    params = held(model.params)
    assert params["['embedding']"] == params["['layer_0']['attention']['q']['kernel']"] == 1 / 4, (
        params
    )
    assert (
        params["['layer_0']['mlp']['down']['kernel']"] == 1 / 4
        and params["['norm']['weight']"] == 1 / 2
    ), params
    changes = held(initial_lora(model.params, 2, True, jax.random.key(0)))
    whole = {
        f"['layer_0/attention/{name}']['b']" for name in "kv"
    }  # keys and values have only one head
    assert {name for name, part in changes.items() if part == 1} == whole and min(
        changes.values()
    ) == 1 / 2, changes
    assert lay_batch(np.zeros((8, 33)), mesh_of(model.params)).addressable_shards[0].data.shape == (
        4,
        33,
    )


if __name__ == "__main__":
    run(main)
