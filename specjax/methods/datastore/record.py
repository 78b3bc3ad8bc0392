"""`Datastore`: a corpus whose positions are sorted by the tokens before them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import tokenizers

from specjax._internal.checks import listed, typed, whole
from specjax.methods.datastore.drafter import DatastoreDrafter
from specjax.methods.datastore.inputs import Entry, check_fits, predict_size, read_tokens
from specjax.methods.datastore.lookup import DEPTH, DatastoreParams
from specjax.methods.datastore.proposer import DatastoreLookup
from specjax.methods.datastore.sorting import SEPARATORS, sort_places
from specjax.models import LanguageModel
from specjax.parallel import devices_of, require
from specjax.text import vocabulary_digest

_MOST = 2**31 - 1 - DEPTH
"""The most tokens of a datastore: positions are int32."""


@dataclasses.dataclass(frozen=True, eq=False)
class Datastore:
    """A corpus in which the proposer `datastore` looks up the continuations of the last tokens.

    The arrays are on the host, and may be those of a file that is read where they are used.
    `drafter` copies them to the device, padded to the capacity.  So datastores of equal capacity
    share their compiled programs.
    """

    tokens: np.ndarray  # [DEPTH + T] uint16 or uint32; texts with separators between them
    order: np.ndarray  # [P] int32; positions sorted by their contexts
    starts: (
        np.ndarray
    )  # [V + 1] int32; the first entry of `order` whose context ends with each token
    capacity: int  # the most tokens, separators included
    vocabulary: str | None  # digest of the tokenizer's vocabulary; None: lists of tokens
    name: str = "datastore"  # of its folder, for messages

    @classmethod
    def build(
        cls,
        texts: Sequence[Entry],
        tokenizer: tokenizers.Tokenizer | LanguageModel | None = None,
        *,
        capacity: int | None = None,
        vocab_size: int | None = None,
        name: str = "datastore",
    ) -> Datastore:
        """Builds a datastore of texts, lists of token ids, or files.

        A `pathlib.Path` that ends in `.bin` or `.npy` is a file of token ids; another one is a file
        of UTF-8 text.

        Args:
          texts: the corpus.
          tokenizer: the target's, or the target itself; None if all texts are lists of token ids.
          capacity: the most tokens that it can ever hold, separators included; by default the next
            power of two.
          vocab_size: of the target, if there is no tokenizer.
          name: for messages.

        Raises:
          ValueError: an empty corpus, one that does not fit into the capacity or into memory (which
            is predicted before anything is tokenised), or texts that are neither of these.
          OSError: a file cannot be read.

        Example:
          >>> store = Datastore.build([[1, 2, 3, 4], [1, 2, 5]], vocab_size=8)
          >>> store.size >= 7
          True
        """
        if isinstance(tokenizer, LanguageModel):
            vocab_size = tokenizer.model.vocab_size
            tokenizer = tokenizer.tokenizer
        if tokenizer is not None and vocab_size is None:
            vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1
        if vocab_size is None:
            raise ValueError("lists of token ids need tokenizer= or vocab_size=: pass one of them")
        listed("texts", texts, "a list of texts, token lists or paths")
        if capacity is not None:
            wanted = f"a whole number, at least 1 and at most {_MOST}"
            capacity = whole("capacity", capacity, 1, _MOST, wanted)
        check_fits(predict_size(texts, tokenizer, vocab_size), capacity)
        tokens = read_tokens(texts, tokenizer, vocab_size)
        words = None if tokenizer is None else vocabulary_digest(tokenizer)
        return cls._of(tokens, vocab_size, capacity, words, name)

    @classmethod
    def _of(
        cls, tokens: np.ndarray, vocab_size: int, capacity: int | None, words: str | None, name: str
    ) -> Datastore:
        size = len(tokens) - DEPTH
        capacity = min(1 << max(size - 1, 1).bit_length(), _MOST) if capacity is None else capacity
        if size > capacity:
            raise ValueError(
                f"the corpus has {size:,} tokens, and capacity={capacity:,}: raise the capacity, "
                "or leave texts out"
            )
        return cls(tokens, *sort_places(tokens, vocab_size), capacity, words, name)

    @property
    def vocab_size(self) -> int:
        """The number of token ids of the tokenizer that it was built with."""
        return len(self.starts) - 1

    @property
    def size(self) -> int:
        """The number of tokens that it holds, separators included."""
        return len(self.tokens) - DEPTH

    @property
    def nbytes(self) -> int:
        """The size on a device, in bytes."""
        return self.capacity * (self.tokens.itemsize + 4)

    def __repr__(self) -> str:
        return (
            f"Datastore({self.name!r}, {self.size:,} of {self.capacity:,} tokens, "
            f"{self.nbytes / 1e6:.1f} MB)"
        )

    def extended(
        self,
        texts: Sequence[Entry],
        tokenizer: tokenizers.Tokenizer | LanguageModel | None = None,
    ) -> Datastore:
        """Returns a datastore of the same capacity that holds these texts, too.

        Its drafter compiles nothing anew.

        Raises:
          ValueError: as `build`; or another tokenizer than it was built with.
        """
        words = tokenizer.tokenizer if isinstance(tokenizer, LanguageModel) else tokenizer
        if words is not None and vocabulary_digest(words) != self.vocabulary:
            raise ValueError(
                f"{self.name} was built with another tokenizer: pass the one of its target"
            )
        new = read_tokens(texts, words, self.vocab_size)
        tokens = np.concatenate([self.tokens, new[DEPTH:]])
        return self._of(tokens, self.vocab_size, self.capacity, self.vocabulary, self.name)

    def drafter(
        self,
        target: LanguageModel,
        num_drafts: int = 4,
        branching: Sequence[int] | None = None,
        min_share: float = 0.0,
    ) -> DatastoreDrafter:
        """Returns a drafter for `generate(drafter=...)`.

        Args:
          target: the model whose tokenizer made the tokens.
          num_drafts: the length of a chain of drafts.
          branching: children per node for each level of a tree; None: a chain.
          min_share: a row has no drafts where the most probable token has a lower probability.

        Raises:
          ValueError: the target has another tokenizer, or its device too little free memory.

        Example:
          >>> specjax.generate(target, prompt, drafter=store.drafter(target, num_drafts=4))
        """
        typed("what specjax.load(folder) returns", LanguageModel, target=target)
        size = target.model.vocab_size
        proposer = DatastoreLookup(size, num_drafts, branching, min_share)
        made = DatastoreDrafter(proposer, None, self.name, vocabulary=self.vocabulary)
        made.check(target)
        if size < self.vocab_size:
            raise ValueError(
                f"{self.name} has token ids up to {self.vocab_size - 1}, and {target.name} only "
                f"{size} tokens: build it with the tokenizer of this target"
            )
        require(
            self.nbytes,
            devices_of(target.params),
            f"the datastore {self.name} with a capacity of {self.capacity:,} tokens",
            "build it with a smaller capacity",
        )
        return dataclasses.replace(made, params=self.arrays(size))

    def arrays(self, vocab_size: int | None = None) -> DatastoreParams:
        """Returns the parameters of the proposer, on the default device.

        Args:
          vocab_size: of the target, if its logits have more entries than the tokenizer has tokens.
        """
        size = self.vocab_size if vocab_size is None else vocab_size
        separator = SEPARATORS[self.tokens.dtype]
        tokens = np.full(DEPTH + self.capacity, separator, self.tokens.dtype)
        tokens[: len(self.tokens)] = self.tokens
        order = np.zeros(self.capacity, np.int32)
        order[: len(self.order)] = self.order
        starts = np.append(self.starts, np.full(size - self.vocab_size, self.starts[-1], np.int32))
        # Each token is once the last one of a context, except at the end of a text.
        prior = (np.diff(starts) + 1.0) / (len(self.order) + size)
        put = map(jnp.asarray, (tokens, order, starts, prior.astype(np.float32)))
        return DatastoreParams(*put)
