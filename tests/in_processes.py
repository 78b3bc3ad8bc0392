"""One of two processes with four devices each, for `tests/test_processes.py`:

    python tests/in_processes.py OUT TEXT TARGET HOST:PORT ID

Trains two steps, decodes, says on stdout what came of it, and trains on until somebody ends it.
"""

import json
import sys

from tests.train_on_meshes import EVAL, SIZES
from train import pretrain
from train.options import run

LANGUAGE = ("--batch-size", "8", "--warmup-steps", "1", "--log-every", "1", *EVAL, *SIZES, "--vocab-size", "300",
            "--decay-fraction", "0", "--save-every", "2", "--eval-every", "100000")  # fmt: skip
PROMPTS = ["the cat sat on the", "the dog", "that cat sat, that"]


def main() -> None:
    out, text, target, coordinator, number = sys.argv[1:]
    common = ["--data", text, "--out", out, *LANGUAGE, "--steps", "100000", "--mesh", "data=2,fsdp=2,model=2"]
    joined = ["--coordinator", coordinator, "--num-processes", "2", "--process-id", number]
    pretrain.main([*common, *joined, "--stop-at", "2"])

    import specjax

    mesh = specjax.make_mesh(data=2)
    model = specjax.load(target, mesh=mesh)
    found = specjax.generate(model, PROMPTS, proposer=specjax.NGram(3), max_new_tokens=8, temperature=[1.0, 0.0, 0.7])
    print(json.dumps(found.tokens), flush=True)
    specjax.save(model, f"{out}/saved")
    pretrain.main(common)


if __name__ == "__main__":
    run(main)
