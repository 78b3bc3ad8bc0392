"""How many bfloat16 texts of a tree equal plain decoding: python tests/near_ties.py [--rows 400].

The shipped pair decodes 48 greedy tokens after pieces of the held-out prompts, with trees of 16
nodes, plainly at the width of one token, and plainly at the width of 16.  400 rows take minutes on
two cores.
"""

from __future__ import annotations

import argparse
import json
import pathlib

import jax
import numpy as np

import specjax
from specjax import Decoder, DraftTree, Match, NoProposer, Params, Sampling

SHIPPED = pathlib.Path(__file__).parent.parent / "checkpoints" / "pycode"
WIDTH, NEW = 32, 48


def pieces(target: specjax.LanguageModel, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Pieces of 8 to 32 tokens of the held-out prompts in turn, padded, and their lengths."""
    assert target.tokenizer is not None
    lines = (SHIPPED / "prompts.jsonl").read_text().splitlines()
    prompts = [target.tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines]
    rng, tokens, lengths = np.random.default_rng(0), np.zeros((rows, WIDTH), np.int32), []
    for row in range(rows):
        prompt, size = prompts[row % len(prompts)], int(rng.integers(8, WIDTH + 1))
        start = int(rng.integers(0, max(1, len(prompt) - size)))
        piece = prompt[start : start + size]
        tokens[row, : len(piece)] = piece
        lengths.append(len(piece))
    return tokens, np.array(lengths, np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=400)
    rows = parser.parse_args().rows
    target, draft = (specjax.load(SHIPPED / name, dtype="bfloat16") for name in ("target", "draft"))
    tokens, lengths = pieces(target, rows)
    keys = jax.random.split(specjax.make_key(0), rows)

    def texts(proposer, arrays=None) -> np.ndarray:
        decoder = Decoder(target.model, proposer, Match(), (), WIDTH + NEW)
        params, limit = Params(target.params, arrays), lengths + np.int32(NEW)
        sampling = Sampling.create(rows, 0.0)
        state = decoder.prefill(params, tokens, lengths, limit=limit, sampling=sampling, key=keys)
        written = np.asarray(decoder.run(params, state).tokens)
        return np.take_along_axis(written, lengths[:, None] + np.arange(NEW), axis=1)

    tree = DraftTree(draft.model, target.model.vocab_size, (3, 2, 1))
    found = texts(tree, draft.params)
    for width in (1, tree.num_nodes):
        differ = int((found != texts(NoProposer(width))).any(1).sum())
        print(f"against NoProposer({width}): {differ} of {rows} texts differ", flush=True)


if __name__ == "__main__":
    main()
