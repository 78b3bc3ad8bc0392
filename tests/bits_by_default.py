"""Compare the bits of speculation with plain decoding: python tests/bits_by_default.py.

The tests compile without optimisation, so they cannot see rounding that only optimised code has.
`tests/process/test_bits.py` therefore starts this script in a process of its own, where XLA
optimises as it does by default. For each case it prints how many rows were compared and how many
differ.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from exact_states import MIXERS, compare
from toys import TRANSFORMERS as toys

from specjax import Decoder, Match, Medusa, NoProposer, Params, Processors, Sampling
from specjax.methods import MedusaParams
from specjax.methods.medusa.network import MedusaHeads, initial_medusa
from specjax.processors import process

ROWS, WIDTH, NEW = 64, 64, 12


def medusa(dtype) -> tuple[int, int]:
    """Compare a chain of Medusa heads with plain decoding of the same width: texts and target
    caches."""
    net, heads = toys.model(dtype=dtype), MedusaHeads(2, 32, toys.VOCAB)
    weights = jax.tree.map(lambda x: x.astype(dtype), toys.weights())
    bank = initial_medusa(heads, weights["head"]["kernel"])
    bank = jax.tree.map(lambda x: jnp.asarray(x, dtype)[None], bank)
    of_heads = MedusaParams(bank, jnp.int32(0), {"head": weights["head"]})
    # Only with this many rows does XLA compile the prompt differently when hidden states are read.
    tokens = np.random.default_rng(0).integers(1, toys.VOCAB, (ROWS, WIDTH), dtype=np.int32)
    lengths = np.full(ROWS, toys.model().max_positions - NEW, np.int32)
    states = []
    for proposer, arrays in ((NoProposer(3), None), (Medusa(heads), of_heads)):
        decoder = Decoder(net, proposer, Match(), (), WIDTH)
        state = decoder.prefill(
            Params(weights, arrays), tokens, lengths, limit=lengths + np.int32(NEW),
            key=toys.keys(ROWS), sampling=Sampling.create(ROWS, 1.0),
        )  # fmt: skip
        state = decoder.run(Params(weights, arrays), state)
        states.append(jax.device_get(state.replace(key=None)))
    plain, drafted = states
    assert drafted.stats.accepted.sum() > ROWS
    return ROWS, sum(bits(plain, row) != bits(drafted, row) for row in range(ROWS))


def bits(state, row: int) -> bytes:
    end = int(state.length[row])
    return b"".join(
        leaf.tobytes() for leaf in (state.tokens[row, :end], *toys.committed(state.cache, row))
    )


class Rows(NamedTuple):
    """The fields that `process` reads of a state."""

    processors: Processors
    length: jax.Array


def penalties() -> tuple[int, int]:
    """Compare a token counted in the output with the same token on a draft's path, at several
    widths."""
    rows, size, times = 64, 512, 6
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(rows, 1, size)) * 5, jnp.float32)
    settings = Processors.create(
        rows,
        size,
        frequency_penalty=rng.uniform(0.05, 1, rows),
        repetition_penalty=rng.uniform(0.8, 1.3, rows),
    )
    token = rng.integers(0, size, rows)

    @jax.jit
    def processed(logits, token, times, path):
        prompt, length = jnp.zeros((rows, 1), jnp.int32), jnp.ones(rows, jnp.int32)
        begun = settings.begin(prompt, length, size, False)
        begun = begun.replace(counts=begun.counts.at[jnp.arange(rows), token].add(times))
        return process(Rows(begun, length), jnp.repeat(logits, path.shape[1], axis=1), path)

    wanted = np.asarray(processed(logits, token, times, jnp.full((rows, 1, 0), -1)))[:, 0]
    wrong = 0
    for ahead in range(1, 5):
        path = np.full((rows, 5, 4), -1, np.int32)
        path[:, :, :ahead] = token[:, None, None]
        actual = np.asarray(processed(logits, token, times - ahead, jnp.asarray(path)))
        wrong += sum(
            actual[row, node].tobytes() != wanted[row].tobytes()
            for row in range(rows)
            for node in range(5)
        )
    return 4 * 5 * rows, wrong


def states() -> tuple[int, int]:
    """Compare the states of recurrent layers after chains and trees with those of plain reading."""
    found = [compare(name, is_tree) for name in MIXERS for is_tree in (False, True)]
    return sum(rows for rows, _ in found), sum(wrong for _, wrong in found)


CASES = {
    "float32": lambda: medusa(jnp.float32),
    "bfloat16": lambda: medusa(jnp.bfloat16),
    "penalties": penalties,
    "states": states,
}

if __name__ == "__main__":
    for name, case in CASES.items():
        print(name, *case(), flush=True)
