"""The laws of a family: it computes what transformers computes, which `small_families` has stored.

A subclass names the groups of families that it holds to them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_families

import specjax

DENSE = ("", "dense")
ROUTED = ("experts", "gemma4", "latent")
RECURRENT = tuple(name for name in small_families.GROUPS if name not in (*DENSE, *ROUTED))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The families of the groups of a subclass are the cases of every law."""
    if metafunc.cls is not None and "case" in metafunc.fixturenames:
        groups = metafunc.cls.GROUPS
        metafunc.parametrize(
            "case", [case for name in groups for case in small_families.GROUPS[name]]
        )


class StoredFamilies:
    """The laws of some groups of families."""

    GROUPS: tuple[str, ...]

    def test_logits_and_features(self, case):
        """Logits differ by at most 1e-5 of their size, and tap i is the input of layer i, within
        the same bound; windows and long positions are reached."""
        loaded = specjax.load(small_families.folder(case))
        arrays = small_families.stored()[1]
        logits, states = arrays[f"{case}: logits"], arrays[f"{case}: states"]
        tokens, places = small_families.text(), np.array(small_families.PLACES)
        taps = tuple(range(len(states)))

        @jax.jit
        def read(params):
            out = loaded.model.apply(params, tokens, jnp.arange(tokens.shape[1])[None], taps=taps)
            return out.logits[0], out.features[0]

        found, features = (np.asarray(x)[places] for x in read(loaded.params))
        np.testing.assert_allclose(found, logits, rtol=0, atol=1e-5 * np.abs(logits).max())
        wanted = states.swapaxes(0, 1).reshape(len(places), -1)
        np.testing.assert_allclose(features, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())

    def test_what_is_written_is_read_again(self, case, tmp_path):
        """A saved copy is the same model, bit for bit, with all tensors under their names."""
        loaded = specjax.load(small_families.folder(case))
        specjax.save(loaded, tmp_path)
        again = specjax.load(tmp_path)
        assert again.model == loaded.model
        jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)
        shapes = small_families.stored()[0][case]["shapes"]
        assert again.num_params == sum(int(np.prod(shape)) for shape in shapes.values())
