"""MTP layers and Gemma's assistants on meshes: the same texts, with every part of a drafter split.

Several devices need a process of their own.
"""

import subprocess
import sys

import gemma_assistants
import mtp_folders
import small_families
from several_devices import environment

_FOUR = r"""
import sys
import jax
import specjax
from specjax import Chain, StaticTree
from specjax.parallel import make_mesh

latent, delta, several, gemma, assistant = sys.argv[1:]
assert jax.device_count() == 4
prompts = [[5, 9, 30, 31, 5, 9, 2, 8, 4, 11, 12, 13], [7, 7, 8, 10]]
how = {"max_new_tokens": 10, "temperature": 1.0, "seed": 3, "eos": []}


def check(folder, mesh, load):
    wanted = specjax.generate(specjax.load(folder), prompts, proposer="none", **how).tokens
    target = specjax.load(folder, mesh=mesh)
    for shape, numbers in ((Chain, {"num_drafts": 3}), (StaticTree, {"branching": (2, 2)})):
        drafter = load(target, shape, **numbers)
        out = specjax.generate(target, prompts, drafter=drafter, **how)
        assert out.tokens == wanted, (folder, shape)
        assert out.stats.accepted > 0
    return drafter.params


for folder in (latent, delta, several):
    own = check(folder, make_mesh(data=2, model=2), specjax.load_mtp)["network"]
    kernel = own.get("depth_1", own)["project"]["kernel"]
    assert kernel.addressable_shards[0].data.shape[0] * 2 == kernel.shape[0]


def load(target, shape, **numbers):
    return specjax.load_drafter(assistant, target, shape, **numbers)


for sizes in ({"data": 2, "model": 2}, {"data": 1, "model": 4}):
    own = check(gemma, make_mesh(**sizes), load)
    table = own["table"]
    assert table.addressable_shards[0].data.size * sizes["model"] == table.size
print("checked")
"""


def test_texts_on_four_devices():
    """Greedy choices would hide a wrong draft; sampled ones are kept by the rule `match` alone."""
    given = (
        mtp_folders.folder("deepseek_v3, yarn, groups", "deepseek", 1),
        mtp_folders.folder("qwen3_5_text, in turn", "qwen", 1),
        mtp_folders.folder("glm4_moe, groups", "deepseek", 1, count=2),
        small_families.folder(gemma_assistants.CASES["E2B, by cluster"][0]),
        gemma_assistants.folder("E2B, by cluster"),
    )
    done = subprocess.run(
        [sys.executable, "-c", _FOUR, *map(str, given)],
        env=environment(4), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("checked\n")
