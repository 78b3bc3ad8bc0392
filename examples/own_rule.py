"""A rule of your own: accept a draft that is among the target's `top` best tokens.

The rule is not exact: it changes the distribution of the text.

python examples/own_rule.py
"""

import jax
import jax.numpy as jnp
from flax import struct

import specjax
from specjax.contract import Draw, Rule
from specjax.types import Proposal, Verdict


@struct.dataclass
class TopTokens(Rule):
    """Walks down the tree while a child is among the `top` tokens of greatest logit.

    `top` is traced: a new value does not recompile, and each row may have its own.
    """

    top: float = 2.0

    exact = False  # the text is no longer distributed as the target's own
    shared_noise = True  # the next token is the target's own draw, as under `Match`

    def __call__(self, draw: Draw, proposal: Proposal, tree: specjax.Tree, logits) -> Verdict:
        num_nodes = len(proposal.tokens)
        parent = jnp.maximum(tree.parent, 0)
        drafted = logits[parent, proposal.tokens]  # the target's logit of each draft
        rank = (logits[parent] > drafted[:, None]).sum(-1)
        good = (tree.parent >= 0) & (rank < self.top)

        def visit(node, child):
            return jnp.where((tree.parent[child] == node) & good[child], child, node), None

        node, _ = jax.lax.scan(visit, jnp.int32(0), jnp.arange(1, num_nodes, dtype=jnp.int32))
        noise = draw.noise(node[None], tree.depth[node][None])[0]
        return Verdict(node, specjax.sampling.argmax(logits[node] + noise))


if __name__ == "__main__":
    target = specjax.load("checkpoints/pycode/target")
    draft = specjax.load("checkpoints/pycode/draft")
    for top in (1.0, 3.0):
        rule = TopTokens(top)
        print(specjax.generate(target, "def f(", draft=draft, rule=rule, max_new_tokens=32))
