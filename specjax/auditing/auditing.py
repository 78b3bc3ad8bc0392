"""Checks that any target, proposer and rule decode losslessly.

    figures        every rule       the statistics agree with the texts
    ends           every rule       each row ends at its first EOS or at its limit
    greedy         exact rules      at temperature 0: each token is the reference's best one
    same key       shared noise     sampled: each token is what the reference draws with its noise
    row order      every rule       a text does not depend on the other rows of its batch
    same bits      chains           the target's next logits, read from the KV cache, are in every
                                    bit those of plain decoding with passes of the same width (not
                                    if the proposer may abstain: its widths depend on the text)
    width          every rule       a pass over one token and a pass over a proposal agree
    distribution   exact rules      chi-square tests of the first tokens of many samples, as asked
                                    and, in the same batches, hot with top-p and cold with top-k
    features       taps             the proposer gets the hidden states of the right tokens
    acceptance     draft models     with the target as its own draft, every draft is accepted

The reference (`specjax.auditing.reference`) shares only the target's layers with the decoder.  The
last two claims are about speed.  A rule that does not claim to be exact is measured too.
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from specjax._internal.checks import real, within
from specjax.auditing import checks, chisquare, distribution, drafts
from specjax.auditing.reference import Reader, Rounding, precision
from specjax.auditing.report import Check, Distribution, Report
from specjax.auditing.samples import GREEDY, Rows, Runner, batch, kinds_beside
from specjax.auditing.warping import Processing, Settings
from specjax.decoding import Decoder
from specjax.parallel import leader
from specjax.processors import Processors
from specjax.proposers import NoProposer
from specjax.rules import Match, SyntheticAcceptance
from specjax.sampling import Sampling
from specjax.types import Params

_SAMPLING = tuple(field.name for field in dataclasses.fields(Settings))
_OFF = {
    name: parameter.default
    for name, parameter in inspect.signature(Processors.create).parameters.items()
    if name not in ("batch", "vocab_size", "every", "constraint", "constraint_size")
}
"""The settings of logits processors, with the values that switch them off."""
_NAMES = {1: "distribution", 2: "distribution, hot", 3: "distribution, cold"}
_SPREAD = 2  # rows of a batch of samples end up to this many tokens apart
_AGAIN = 4  # this many times as many fresh samples decide a suspicion


def audit(
    decoder: Decoder,
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 32,
    samples: int = 16384,
    num_tokens: int = 3,
    rows: int = 64,
    seed: int = 0,
    significance: float = 1e-3,
    **settings: Any,
) -> Report:
    """Checks that a decoder is as exact as it claims.

    Args:
      decoder: target, proposer and rule; its capacity must hold the longest prompt and
        `max_new_tokens` more tokens.
      params: arrays of the decoder.
      prompts: token ids; at most half as many as `rows`.  A few prompts after which the target is
        uncertain give the most sensitive test.
      max_new_tokens: length of the texts that are compared token for token.
      samples: the number of texts drawn, over all prompts and kinds of rows.
      num_tokens: how many tokens of those texts the distribution checks compare.
      rows: rows of a batch; all batches run the same program.
      seed: of all keys.
      significance: the p-value s below which a check fails.  From s^2 to sqrt(s) / 3 a p-value is
        a suspicion: four times as many fresh samples are drawn, and their p-value decides.  So a
        lossless decoder fails less often than s.
      **settings: numbers for `Sampling.create` (the temperature is 1 by default, and must be
        greater than 0), and keywords of `Processors.create`, the same for all rows.

    Raises:
      ValueError: arguments that do not fit, and what to pass instead; before anything is compiled.

    Example:
      >>> target = specjax.load(specjax.shipped("tiny/target"))
      >>> proposer, rule = specjax.NGram(2), specjax.Match()
      >>> decoder = specjax.Decoder(target.model, proposer, rule, target.eos, capacity=32)
      >>> params, few = specjax.Params(target.params), {"samples": 256, "max_new_tokens": 8}
      >>> specjax.audit(decoder, params, [[5, 6, 7], [8, 9]], **few).passed
      True
    """
    if isinstance(decoder.rule, SyntheticAcceptance):
        raise ValueError(
            f"{decoder.rule} accepts drafts whatever they are, so an audit of it says nothing: "
            "pass the rule with which you decode, such as Match()"
        )
    ids = [list(prompt) for prompt in prompts]
    chosen, processors = _split(settings)
    _check(decoder, ids, max_new_tokens, samples, num_tokens, rows, significance)
    within("seed", seed, 0)
    Sampling.create(1, **dataclasses.asdict(chosen))
    Processors.create(1, decoder.target.vocab_size, **processors)
    work = _Audit(
        decoder, params, ids, chosen, processors, max_new_tokens, samples, num_tokens, rows, seed,
        significance,
    )  # fmt: skip
    rule, proposer = decoder.rule, decoder.proposer
    subject = (
        f"{type(proposer).__name__} of {proposer.num_nodes} nodes, rule {rule}"
        f"{'' if rule.exact else ' (inexact)'}; {len(ids)} prompts, {chosen}"
    )
    for name, value in processors.items():
        if (value or _OFF[name]) and value != _OFF[name]:
            subject += f", {name.replace('_', '-')} {value}"
    return Report(subject, (*work.texts(), *work.distributions()), significance)


_Drawn = dict[distribution.Group, collections.Counter[tuple[int, ...]]]


@dataclasses.dataclass
class _Audit:
    """One audit: its arguments, and the values that its checks share."""

    decoder: Decoder
    params: Params
    prompts: list[list[int]]
    asked: Settings
    processors: dict[str, Any]
    max_new_tokens: int
    samples: int
    num_tokens: int
    size: int
    seed: int
    significance: float
    exact: bool = dataclasses.field(init=False)
    kinds: tuple[Settings, ...] = dataclasses.field(init=False)
    processing: Processing = dataclasses.field(init=False)
    reader: Reader = dataclasses.field(init=False)
    runner: Runner = dataclasses.field(init=False)
    rounding: Rounding = dataclasses.field(init=False)  # `texts` measures it
    greedy: _Drawn = dataclasses.field(default_factory=dict)  # greedy texts in batches of samples

    def __post_init__(self) -> None:
        decoder = self.decoder
        self.exact = decoder.rule.exact
        self.kinds = kinds_beside(self.asked, decoder.target.vocab_size)
        self.processing = Processing(
            self.processors, decoder.eos, decoder.logits_processor, decoder.capacity
        )
        self.reader = Reader(decoder.target, self.params.target, self.size, self.seed)
        self.runner = Runner(decoder, self.params, self.processors)

    def texts(self) -> list[Check]:
        """Runs the checks of single texts; they also measure the rounding."""
        rows = self._rows(0, self.max_new_tokens, self.max_new_tokens // 4)
        texts = self.runner.run(rows)
        made = [checks.figures(texts), checks.ends(texts, self.decoder.eos)]

        target, width = self.decoder.target, self.decoder.proposer.num_nodes
        plain = Runner(self._plain(width), Params(self.params.target), self.processors).run(rows)
        eps = precision(self.params.target, plain.state.cache)
        one, wide = (
            checks.next_logits(target, n, self.params.target, plain.state) for n in (1, width)
        )
        self.rounding = Rounding.measure(
            self.reader.all_after(plain.texts, rows.width), [one, wide], eps
        )

        shared = self.decoder.rule.shared_noise
        greedy, sampled = self._judge(rows, texts.texts, self.exact and shared)
        made.append(greedy.check("greedy", self.exact))
        if self.exact and shared:
            made.append(sampled.check("same key", True))
        order = np.random.default_rng(self.seed).permutation(self.size)
        made.append(
            checks.layout(texts, self.runner.run(rows.shuffled(order)), order, self.rounding)
        )
        proposer = self.decoder.proposer
        if self.exact and proposer.is_chain and not proposer.narrower:
            own = checks.next_logits(target, width, self.params.target, texts.state)
            made.append(checks.same_bits(texts, plain, own, wide))
        if width > 1:
            made.append(checks.widths(one, wide, width, eps))
        return [*made, *self._drafts(rows, eps)]

    def _judge(
        self, rows: Rows, texts: list[list[int]], shared: bool
    ) -> tuple[checks.Judged, checks.Judged]:
        return checks.tokens(rows, texts, self.reader, self.processing, self.rounding, shared)

    def _plain(self, width: int) -> Decoder:
        """Returns plain decoding with passes over `width` tokens."""
        d = self.decoder
        return Decoder(d.target, NoProposer(width), Match(), d.eos, d.capacity, d.logits_processor)

    def _rows(self, number: int, new_tokens: int, spread: int) -> Rows:
        return batch(self.prompts, self.kinds, self.size, new_tokens, self.seed, number, spread)

    def _drafts(self, rows: Rows, eps: float) -> list[Check]:
        """Checks the claims about speed."""
        proposer, made = self.decoder.proposer, list[Check]()
        if proposer.taps and not proposer.shares_cache:
            size = drafts.width_of_features(self.reader, proposer.taps)
            recorder = dataclasses.replace(self.decoder, proposer=drafts.Recorder(proposer, size))
            texts = Runner(recorder, self.params, self.processors).run(rows)
            made.append(drafts.features(texts, self.reader, proposer.taps, eps))
        perfect = drafts.with_itself(self.decoder) if self.exact else None
        if perfect is not None:
            params = Params(self.params.target, self.params.target)
            texts = Runner(perfect, params, self.processors).run(rows)
            made.append(drafts.acceptance(texts, self.rounding))
        return made

    def distributions(self) -> list[Check]:
        """Runs a chi-square test for each kind of settings, and checks the greedy rows.

        Fresh samples decide a suspicion.
        """
        batches = -(-self.samples // self.size)
        made = self._sampled(1, batches)
        doubtful = [chisquare.is_suspicious(x.p_value, self.significance) for x in made]
        if self.exact and any(doubtful):
            again = self._sampled(1 + batches, _AGAIN * batches)
            made = [
                second if doubt else first
                for first, second, doubt in zip(made, again, doubtful, strict=True)
            ]
        rows, texts = self._greedy()
        if not texts:  # few rows, none of them greedy
            return [*made]
        greedy, _ = self._judge(rows, texts, False)
        return [greedy.check("greedy, samples", self.exact), *made]

    def _greedy(self) -> tuple[Rows, list[list[int]]]:
        """Returns the distinct greedy texts of all batches of samples so far, each as one row."""
        found = sorted((p, new) for (_, p), texts in self.greedy.items() for new in texts)
        rows = self._rows(0, self.max_new_tokens, 0)
        prompt_of = np.array([p for p, _ in found], int)
        texts = [[*self.prompts[p], *new] for p, new in found]
        return dataclasses.replace(
            rows,
            prompt_of=prompt_of,
            kind=np.full(len(found), GREEDY),
            limit=np.array(list(map(len, texts)), np.int32),
        ), texts

    def _sampled(self, first: int, batches: int) -> list[Distribution]:
        """Draws batches of samples, and judges them."""
        drawn: _Drawn = {}
        spread = min(_SPREAD, self.max_new_tokens - self.num_tokens)
        start, quiet = None, None if leader() else True
        for number in tqdm(
            range(first, first + batches), "audit", unit="batch", disable=quiet, file=sys.stderr
        ):
            rows = self._rows(number, self.num_tokens + spread, spread)
            start = self.runner.start(rows) if start is None else start
            texts = self.runner.run(rows, start)
            for kind, prompt, new in zip(rows.kind, rows.prompt_of, texts.new, strict=True):
                into, end = (self.greedy, None) if kind == GREEDY else (drawn, self.num_tokens)
                counter = into.setdefault((int(kind), int(prompt)), collections.Counter())
                counter[tuple(new[:end])] += 1
        sizes = {group: counter.total() for group, counter in drawn.items()}
        cells = distribution.cells_of(
            self.reader, self.prompts, self.kinds, self.processing, sizes, self.num_tokens,
            self.rounding.slack,
        )  # fmt: skip
        made = []
        for kind, name in _NAMES.items():
            groups = [group for group in drawn if group[0] == kind]
            if groups:
                moved = distribution.rounding_of(self.rounding, self.kinds[kind], self.num_tokens)
                made.append(
                    distribution.judge(
                        name,
                        self.exact,
                        {group: cells[group] for group in groups},
                        {group: drawn[group] for group in groups},
                        self.significance,
                        moved,
                    )
                )
        return made


def _split(settings: dict[str, Any]) -> tuple[Settings, dict[str, Any]]:
    """Splits settings into those of sampling, and keywords of `Processors.create`."""
    unknown = sorted(set(settings) - {*_SAMPLING, *_OFF})
    if unknown:
        raise ValueError(
            f"{unknown[0]}={settings[unknown[0]]!r} is no setting of an audit; it takes "
            f"{', '.join((*_SAMPLING, *_OFF))}"
        )
    for name in _SAMPLING:
        if np.ndim(settings.get(name, 0)) != 0:
            raise ValueError(
                f"{name}={settings[name]}; an audit takes one number, which all rows share"
            )
    temperature = settings.get("temperature", 1.0)
    real(
        "temperature",
        temperature,
        "(0, inf)",
        ", since 0 draws nothing to compare (it is checked too)",
    )
    processors = {name: settings[name] for name in _OFF if name in settings}
    return Settings(**{name: settings[name] for name in _SAMPLING if name in settings}), processors


def _check(
    decoder: Decoder,
    ids: list[list[int]],
    max_new_tokens: int,
    samples: int,
    num_tokens: int,
    rows: int,
    significance: float,
) -> None:
    """Raises ValueError for arguments of `audit` that do not fit."""
    if not ids or not all(ids):
        raise ValueError("audit needs at least one prompt, and each needs at least one token")
    least, most = min(map(min, ids)), max(map(max, ids))
    if least < 0 or most >= decoder.target.vocab_size:
        raise ValueError(
            f"the prompts hold token ids from {least} to {most}; "
            f"the vocabulary has {decoder.target.vocab_size}"
        )
    each = f", two for each of the {len(ids)} prompts, which are decoded greedily and sampled"
    within("rows", rows, 2 * len(ids), note=each)
    within("max_new_tokens", max_new_tokens, 1)
    within("num_tokens", num_tokens, 1, max_new_tokens, ", at most max_new_tokens")
    within("samples", samples, rows, note=", the rows of a batch")
    real("significance", significance, "(0, 1)")
    room, longest = min(decoder.capacity, decoder.target.max_positions), max(map(len, ids))
    if longest + max_new_tokens > room:
        raise ValueError(
            f"a prompt of {longest} tokens and max_new_tokens={max_new_tokens} do not fit into "
            f"{room}: raise the decoder's capacity, or pass shorter prompts or a smaller "
            "max_new_tokens"
        )
