"""What the layers of a network compute, as far as the kernel of whole layers needs to know."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class LayersForm:
    """What the layers of a network compute.

    Attributes:
      weight: the dtype of the matrices: "float32" [in, out], or "int8" [out, in], which has a scale
        [out] for each output after it.
      dim: the size of a head.
      activation: "silu" or "gelu_tanh".
      normed: whether the layers norm what attention reads; else `read` is normed, of one layer.
      biased: whether queries, keys and values have biases.
      head_norms: whether queries and keys have RMS norms over each head, before the rope.
      capped: whether scores have a softcap.
      page: the slots of a page, where keys and values are pages [P, K, page, D]; None: rows have
        arrays of their own.
    """

    weight: str
    dim: int
    activation: str = "silu"
    normed: bool = True
    biased: bool = False
    head_norms: bool = False
    capped: bool = False
    page: int | None = None

    @property
    def name(self) -> str:
        """Returns a name that tells forms apart."""
        said = [self.weight, self.dim, self.activation]
        said += [flag for flag in ("normed", "biased", "head_norms", "capped") if vars(self)[flag]]
        said += [] if self.page is None else ["pages_of", self.page]
        return "_".join(map(str, said))

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of a layer's arguments, in their order.

        The last two are the layer's keys and values; it returns both with the tokens staged.
        """
        found: list[str] = ["attention_norm"] * self.normed
        found += self._matrices("q", "k", "v")
        found += ["q_bias", "k_bias", "v_bias"] * self.biased
        found += ["q_norm", "k_norm"] * self.head_norms
        found += [*self._matrices("o"), "mlp_norm", *self._matrices("gate", "up", "down")]
        return (*found, "keys", "values")

    def _matrices(self, *names: str) -> list[str]:
        parts = ("", "_scale") if self.weight == "int8" else ("",)
        return [name + part for name in names for part in parts]
