"""`rollout_keys`: the key of each sample, from what it is a sample of."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np
from jax import Array

from specjax._internal.checks import chosen, whole
from specjax.sampling import keys_of_rows

NEVER = "never"


def rollout_keys(
    run: int,
    prompts: Sequence[Sequence[int]],
    samples: int = 1,
    *,
    epoch: int = 0,
    refresh: int | Literal["never"] = 1,
) -> Array:
    """Returns a key for each sample: a hash of (run, prompt, sample, epoch // refresh).

    A text is a sample of the policy only if the weights do not depend on its key.  So training
    takes `refresh=1`, the default, which makes fresh keys in every epoch.  With `refresh="never"`
    the keys stay, which is right for texts that are never trained on: an evaluation of several
    checkpoints, or rollouts that are brought to newer weights before they are used.  Two equal
    prompts get different keys.

    Args:
      run: the seed of the run.
      prompts: the token ids of P prompts.
      samples: of each prompt.
      epoch: number of the epoch, from 0.
      refresh: epochs for which a key is kept, or "never" for keys that stay.

    Returns:
      [P * samples] PRNG keys; the samples of a prompt follow each other.

    Raises:
      ValueError: a number that is negative, or a `refresh` below 1.

    Example:
      >>> from specjax.rollouts import rollout_keys
      >>> rollout_keys(0, [[5, 9], [7]], samples=4).shape
      (8,)
    """
    whole("run", run, 0, 2**63 - 1, "a whole number, 0 or more")
    whole("epoch", epoch, 0, 2**63 - 1, "a whole number, 0 or more")
    whole("samples", samples, 1, 2**31 - 1, "a whole number, 1 or more")
    if isinstance(refresh, str):
        chosen("refresh", refresh, (NEVER,))
    else:
        whole("refresh", refresh, 1, 2**63 - 1, 'a number of epochs, 1 or more, or "never"')
    round_ = 0 if isinstance(refresh, str) else epoch // refresh
    words, seen = [], dict[str, int]()
    for prompt in prompts:
        digest = prompt_digest(prompt)
        before = seen.get(digest, 0)
        seen[digest] = before + 1
        for sample in range(samples):
            text = f"{run} {digest} {before} {sample} {round_}"
            words.append(np.frombuffer(hashlib.blake2b(text.encode()).digest()[:8], np.uint32))
    return keys_of_rows(jax.numpy.asarray(np.stack(words)), len(words))


def prompt_digest(prompt: Sequence[int]) -> str:
    """Returns a hash of the token ids of a prompt."""
    return hashlib.blake2b(np.asarray(prompt, np.int64).tobytes(), digest_size=16).hexdigest()
