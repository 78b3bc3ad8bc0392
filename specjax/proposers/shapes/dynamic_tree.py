"""`DynamicTree`: grows a tree along the most probable drafts of any source."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from specjax import sampling, tree
from specjax._internal.checks import counts, within
from specjax.contract import Arrays, Context
from specjax.proposers.shapes.base import Shape
from specjax.types import ABSENT, Proposal


@dataclasses.dataclass(frozen=True)
class DynamicTree(Shape):
    """Expands the `width` most probable nodes of each level by `width` children each.

    A node's value is the product of the source's probabilities on its path, and the `num_nodes`
    nodes of greatest value are proposed.  Parents are traced, so every row and step has a tree of
    its own, in one compiled program.

    Under shared noise, the probabilities are those after the noise is added, since proposer and
    rule both have it.  Under independent draws no noise is added: the best nodes are a function of
    the text, so they are proposed as point masses.

    Reference: Li et al. 2024 (EAGLE-2), arXiv 2406.16858, section 4: expansion and reranking.

    Example:
      >>> drafter = specjax.make_drafter(target, draft, DynamicTree, depth=4, num_nodes=16)
    """

    depth: int = 4
    width: int = 4
    num_nodes: int = 16  # proposed nodes, the root included
    is_chain = False
    point_mass = True
    estimates = True

    def __post_init__(self) -> None:
        super().__post_init__()
        counts(depth=self.depth, width=self.width, num_nodes=self.num_nodes)
        within("depth", self.depth, 1)
        size = self.source.vocab_size
        within("width", self.width, 1, size, ", the size of the vocabulary")
        candidates = 1 + self.width + (self.depth - 1) * self.width**2
        made = (
            f", since depth={self.depth} and width={self.width} make {candidates} candidates, the "
            "root included"
        )
        within("num_nodes", self.num_nodes, 2, candidates, made)
        # All expanded nodes are staged, even those that are not proposed in the end.
        self.arrange(
            self.num_nodes, self.depth, max(1 + (self.depth - 1) * self.width, self.num_nodes)
        )

    def propose(self, params: Arrays, state: Arrays, context: Context) -> tuple[Proposal, Arrays]:
        rows, width = len(context.pending), self.width
        state, reading, logits = self.source.begin(params, state, context)
        logits, root = logits[:, None], jnp.zeros((rows, 1), jnp.int32)

        # Candidates of all levels.  `parent` indexes into them; `value` is a log-probability.
        tokens, parent = context.pending[:, None], root + ABSENT
        value = jnp.zeros((rows, 1), jnp.float32)
        # The expanded candidates.  `above` is their parent, as an index into `expanded`; `frontier`
        # are those expanded last.
        expanded, above, frontier, new = root, root + ABSENT, root, value
        for level in range(self.depth):
            if level > 0:
                _, best = jax.lax.top_k(new, width)
                above = jnp.concatenate(
                    [above, expanded.shape[1] - frontier.shape[1] + best // width], axis=1
                )
                frontier = tokens.shape[1] - new.shape[1] + best
                expanded = jnp.concatenate([expanded, frontier], axis=1)
                # All expanded nodes but the root, which the source has already read.
                last = jnp.broadcast_to(
                    jnp.arange((level - 1) * width, level * width), (rows, width)
                )
                depth = jnp.repeat(jnp.arange(level), width)
                mask = jax.vmap(tree.ancestor_mask)(above)[:, 1:, 1:]
                nodes = _take(tokens, expanded[:, 1:])
                reading, logits = self.source.read_tree(params, reading, nodes, last, depth, mask)
            noise: Array = jnp.zeros(())
            if context.shared_noise:
                noise = context.noise(jnp.array([0]), jnp.array([level]))
            paths = jax.vmap(tree.path_tokens, (0, 0, None))(tokens, parent, level)
            warped = context.warp(logits, jnp.take_along_axis(paths, frontier[..., None], axis=1))
            chance, best = sampling.top_k(
                jax.nn.log_softmax(sampling.scores(logits, warped, noise)), width
            )
            new = (_take(value, frontier)[..., None] + chance).reshape(rows, -1)
            tokens = jnp.concatenate([tokens, best.reshape(rows, -1)], axis=1)
            parent = jnp.concatenate([parent, jnp.repeat(frontier, width, axis=1)], axis=1)
            value = jnp.concatenate([value, new], axis=1)

        # A parent's value is at least that of its child, and it comes first (top_k breaks ties by
        # index), so the best candidates form a tree.
        _, chosen = jax.lax.top_k(value, self.num_nodes)
        chosen = jnp.sort(chosen, axis=1)
        parents = jax.vmap(jnp.searchsorted)(chosen, _take(parent, chosen)).astype(jnp.int32)
        nodes, parent = _take(tokens, chosen), parents.at[:, 0].set(ABSENT)
        known = self.source.known(params, reading, nodes)
        if known is not None:
            parent = jax.vmap(tree.prune)(parent, known)
        chance = jnp.exp(_take(value, chosen))
        proposal = Proposal(nodes, parent, point_mass=not context.shared_noise, chance=chance)
        return proposal, self.source.end(params, state, reading, proposal)


def _take(x: Array, index: Array) -> Array:
    return jnp.take_along_axis(x, index, axis=1)
