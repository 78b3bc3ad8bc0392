"""A proposer of your own with weights: a table of the most frequent successor of each token.

python examples/own_proposer.py
specjax generate "def fibonacci(n):" --proposer examples.own_proposer:bigrams
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

import specjax
from specjax.contract import Context, Proposer
from specjax.types import Proposal


@dataclasses.dataclass(frozen=True)
class Bigram(Proposer):
    """Drafts a chain in which each token is the most frequent successor of the one before it.

    Its parameters are one table [V] int32; it has no state.
    """

    num_drafts: int = 4
    is_chain = True
    point_mass = True  # nothing is sampled: every draft is a function of the text

    def __post_init__(self):
        self.declare(num_nodes=self.num_drafts + 1, max_depth=self.num_drafts)

    def propose(self, params, state, context: Context):
        tokens = [context.pending]
        for _ in range(self.num_drafts):
            tokens.append(params[tokens[-1]])
        chain = jnp.broadcast_to(specjax.tree.chain(self.num_nodes), (len(tokens[0]), len(tokens)))
        return Proposal(jnp.stack(tokens, axis=1), chain, point_mass=True), state


def bigrams(target: specjax.LanguageModel, draft: specjax.LanguageModel | None) -> specjax.Drafter:
    """A drafter from the bigram counts of texts that the target has generated."""
    out = specjax.generate(target, ["def ", "class ", "import "], max_new_tokens=120, temperature=0)
    counts = np.zeros((target.model.vocab_size,) * 2, np.int32)
    for row in out.tokens:
        np.add.at(counts, (row[:-1], row[1:]), 1)
    return specjax.Drafter(Bigram(), jnp.asarray(counts.argmax(1), jnp.int32), "bigrams")


if __name__ == "__main__":
    target = specjax.load("checkpoints/pycode/target")
    drafter = bigrams(target, None)
    print(specjax.generate(target, "def fibonacci(n):", drafter=drafter, max_new_tokens=32))
