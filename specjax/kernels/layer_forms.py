"""What the layers of a network compute, as far as the kernel of whole layers needs to know."""

from __future__ import annotations

import dataclasses

from specjax.kernels.coding import Coding

MATRICES = "q", "k", "v", "o", "gate", "up", "down"
"""The names of a layer's matrices."""


@dataclasses.dataclass(frozen=True)
class LayersForm:
    """What the layers of a network compute.

    Attributes:
      weight: the matrices: "float32" or "bfloat16_columns" [in, out]; "bfloat16" [out, in], where
        all other arguments of a layer are in bfloat16, too; "int8" [out, in], which has a scale
        [out] for each output after it; or "codes" [out, bytes], which has scales and maybe zeros
        [out, groups] after it.
      dim: the size of a head.
      activation: "silu" or "gelu_tanh".
      normed: whether the layers norm what attention reads; else `read` is normed, of one layer.
      biased: whether queries, keys and values have biases.
      head_norms: whether queries and keys have RMS norms over each head, before the rope.
      capped: whether scores have a softcap.
      page: the slots of a page, where keys and values are pages [P, K, page, D]; None: rows have
        arrays of their own.
      codings: of the `MATRICES`, if they are codes.
    """

    weight: str
    dim: int
    activation: str = "silu"
    normed: bool = True
    biased: bool = False
    head_norms: bool = False
    capped: bool = False
    page: int | None = None
    codings: tuple[Coding, ...] = ()

    @property
    def name(self) -> str:
        """Returns a name that tells forms apart."""
        said = [self.weight, self.dim, self.activation]
        said += [flag for flag in ("normed", "biased", "head_norms", "capped") if vars(self)[flag]]
        said += [] if self.page is None else ["pages_of", self.page]
        different = dict.fromkeys(self.codings)
        said += [coding.name for coding in different]
        if len(different) > 1:
            said.append("".join(str([*different].index(coding)) for coding in self.codings))
        return "_".join(map(str, said))

    @property
    def dtype(self) -> str:
        """Returns the dtype of the stream, of keys and values, and of a layer's other arrays."""
        return "bfloat16" if self.weight == "bfloat16" else "float32"

    @property
    def by_columns(self) -> bool:
        """Returns whether matrices are [in, out]."""
        return self.weight in ("float32", "bfloat16_columns")

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
        return [name + part for name in names for part in self.parts(name)]

    def parts(self, name: str) -> tuple[str, ...]:
        """Returns what the names of the arrays of a matrix have after its name."""
        if self.by_columns or self.weight == "bfloat16":
            return ("",)
        zeros = self.codings and self.codings[MATRICES.index(name)].zeros is not None
        return ("", "_scale", "_zero") if zeros else ("", "_scale")
