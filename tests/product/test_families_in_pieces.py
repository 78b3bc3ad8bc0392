"""Texts of the stored families in chunks and token by token, and trees of those with a state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_families

import specjax


@pytest.mark.parametrize(
    "case",
    [
        "ministral3, growth",  # its queries depend on their positions
        *(case for case in small_families.GROUPS["experts"] if case.startswith("llama4")),
        *small_families.GROUPS["gemma4"],
        *small_families.GROUPS["latent"],
        *small_families.GROUPS["recurrent"],
    ],
)
def test_a_text_in_pieces(case):
    """A text that is read in chunks, and then token by token, has the logits of one pass."""
    loaded = specjax.load(small_families.folder(case))
    logits = small_families.stored()[1][f"{case}: logits"]
    tokens, places = small_families.text(), np.array(small_families.PLACES)
    cache = loaded.model.init_cache(1, tokens.shape[1])

    @jax.jit
    def read(params, tokens, cache):
        places = cache.length[:, None] + jnp.arange(tokens.shape[1])
        out = loaded.model.apply(params, tokens, places, cache)
        return out.logits[0], out.cache.commit(jnp.array([tokens.shape[1]]))

    parts = []
    for start, stop in [(0, 96), (96, 192), *((i, i + 1) for i in range(192, 200))]:
        part, cache = read(loaded.params, tokens[:, start:stop], cache)
        parts.append(np.asarray(part))
    found = np.concatenate(parts)[places]
    np.testing.assert_allclose(found, logits, rtol=0, atol=1e-5 * np.abs(logits).max())


@pytest.mark.parametrize("case", small_families.GROUPS["recurrent"])
def test_trees_of_a_model_with_a_state(case):
    """After accepted and rejected chains and branches of trees a state is that of plain reading."""
    loaded = specjax.load(small_families.folder(case))
    specjax.models.check_model(loaded.model, loaded.params, tolerance=2e-5)
