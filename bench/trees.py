"""python -m bench.trees: are learned trees chosen well?  Counts of a head on the shipped target.

The first table has the tokens a pass of chains and trees of one head at equal numbers of nodes: the
tree of its most probable tokens (as point masses, the tree of EAGLE-2), the tree of this library
as its probabilities choose it, and the one that learns (`calibrated`).  These are counts, so they
are the same on every machine.

The second table compares `adaptive` over the tree with every fixed chain and tree of the same
head.  The time of a step comes from a model of costs, in passes of the target over one token:

    step = 1 + nodes * --token + levels * --draft-cost

A fixed form pays for the nodes that it drafts, and the choice for all nodes of the pass that reads
them, which may have room for more.
Each quotient has a 95 % interval, by a bootstrap over prompts of the texts of the choice and of the
form that is best over all of them; `--keys` draws each prompt's text more than once.
With `--rate` the acceptance is imposed (`SyntheticAcceptance`): the first draft of each level is
accepted at that rate, whatever the head says, and a rejected draft is not the next token.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

import specjax
from bench.command import Report, run
from specjax._internal.checks import whole
from specjax.contract import Context, Draw, Proposer, Rule, Wrapper
from specjax.drafters import Drafter, arrange, tree_widths, widths_of
from specjax.generation import encode_file
from specjax.measure import interval, measure, show
from specjax.options import fields
from specjax.options.command import parse
from specjax.plot import new_figure
from specjax.proposers import (
    MEASURED,
    Adaptive,
    AdaptiveParams,
    AdaptiveState,
    Calibrated,
    Chain,
    DynamicTree,
)
from specjax.tree import Tree
from specjax.tuning import Learned
from specjax.types import ABSENT, Arrays, Params, Proposal, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class TreesOptions(fields.Options):
    """The options of `python -m bench.trees`."""

    target: str = fields.option("checkpoints/pycode/target", "folder of the target")
    drafter: str = fields.option("checkpoints/pycode/eagle3", "folder of the head")
    prompts: str = fields.option("checkpoints/pycode/prompts.jsonl", "prompts, JSON lines")
    limit_prompts: int = fields.count(13, "prompts of the first table; 0 leaves it out", 0)
    new_tokens: int = fields.count(128, "tokens of a text")
    rule: tuple[str, ...] = fields.option(
        ("match", "rejection"), "rules", choices=("match", "rejection")
    )
    temperature: tuple[float, ...] = fields.option((0.0, 1.0), "temperatures")
    num_nodes: tuple[int, ...] = fields.option((9, 17), "nodes of a tree, the root included")
    depth: int = fields.count(8, "levels of a tree")
    width: int = fields.count(4, "children of a node", 2)
    draft_cost: tuple[float, ...] = fields.option(
        (0.02, 0.1, 0.3), "passes of the target that a level of drafts takes"
    )
    token: tuple[float, ...] = fields.option(
        (0.003, 0.02, 0.1), "passes of the target that another node adds to a pass"
    )
    rate: tuple[float, ...] = fields.option((0.3, 0.6, 0.9), "imposed acceptance rates")
    chosen_prompts: int = fields.count(4, "prompts of the second table; 0 leaves it out", 0)
    keys: int = fields.count(1, "texts of each prompt of the second table")
    json: str | None = fields.option(None, "write the rows to this file")
    read: str | None = fields.option(None, "tell the rows of such a file, and measure nothing")
    plot: str | None = fields.option(None, "draw the second table to this file")

    def __post_init__(self) -> None:
        super().__post_init__()
        for nodes in self.num_nodes:
            whole("--num-nodes", nodes, 2, 2**31 - 1, "at least 2, the root included")


@dataclasses.dataclass(frozen=True)
class PointMasses(Wrapper):
    """The most probable tokens of a tree, and no draws: EAGLE-2's tree under any rule."""

    def __post_init__(self) -> None:
        self.declare_like(point_mass=True)

    def propose(self, params: Arrays, state: Arrays, context: Context) -> tuple[Proposal, Arrays]:
        if not context.shared_noise:
            context = dataclasses.replace(context, draw=_Still(context.draw), wants_logits=False)
        proposal, state = self.inner.propose(params, state, context)
        return dataclasses.replace(
            proposal, logits=None, point_mass=not context.shared_noise
        ), state


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Still:
    """A draw without noise."""

    draw: Arrays

    def noise(self, node: jax.Array, depth: jax.Array) -> jax.Array:
        return jnp.zeros_like(self.draw.noise(node, depth))


@struct.dataclass
class _Imposed(specjax.SyntheticAcceptance):
    """Imposed acceptance after which a rejected draft is never the next token.

    So it is under an exact rule, and what learns from the text learns the imposed rate.
    """

    def __call__(self, draw: Draw, proposal: Proposal, tree: Tree, logits: jax.Array) -> Verdict:
        verdict = super().__call__(draw, proposal, tree, logits)
        number = jnp.arange(len(proposal.tokens))
        others = (verdict.next_token + number) % logits.shape[-1]
        rejected = (proposal.parent == verdict.node) & (number > 0)
        taken = (others[:, None] == jnp.where(rejected, proposal.tokens, ABSENT)).any(1)
        return Verdict(verdict.node, others[jnp.argmin(taken)].astype(jnp.int32))


def counted(options: TreesOptions) -> list[Report]:
    """Returns the tokens a pass of each form, for each rule, temperature and number of nodes."""
    target, prompts, head = _loaded(options)
    prompts, rows = prompts[: options.limit_prompts], []
    for nodes in options.num_nodes:
        shape = {"depth": options.depth, "width": options.width, "num_nodes": nodes}
        forms = {
            "chain": head.shaped(Chain, num_drafts=min(nodes - 1, options.depth)),
            "most probable": head.shaped(lambda s, **k: PointMasses(DynamicTree(s, **k)), **shape),
            "drawn": head.shaped(DynamicTree, **shape),
            "learned": head.shaped(lambda s, **k: Calibrated(DynamicTree(s, **k)), **shape),
        }
        for rule in options.rule:
            for name, drafter in forms.items():
                if rule == "match" and name == "most probable":
                    continue  # under shared noise it is the drawn tree
                decoder, params = _decoder(options, target, drafter, specjax.RULES[rule](), prompts)
                for temperature in options.temperature:
                    counts = measure(
                        decoder, params, prompts, options.new_tokens, batch=len(prompts),
                        settings={"temperature": temperature}, seed=0,
                    ).counts  # fmt: skip
                    rows.append(
                        {"nodes": nodes, "rule": rule, "temperature": temperature, "form": name,
                         "tokens_per_pass": float(counts.emitted.sum() / counts.passes.sum())}
                    )  # fmt: skip
                    print(rows[-1], flush=True)
    return rows


def chosen(options: TreesOptions) -> list[Report]:
    """Returns the speed of `adaptive` over the best fixed option, for each acceptance and cost."""
    target, prompts, head = _loaded(options)
    prompts, most = prompts[: options.chosen_prompts], max(options.num_nodes)
    widths, compiled = tree_widths(options.depth, most)
    chains = widths_of(options.depth)
    tree = head.shaped(
        DynamicTree, depth=options.depth, width=options.width, num_nodes=most
    ).proposer
    chain = head.shaped(Chain, num_drafts=options.depth).proposer
    kinds: list[tuple[str, Rule, float]] = [
        *((f"temperature {t:g}", specjax.Match(), t) for t in options.temperature),
        *((f"rate {r:g}", _Imposed(rate=r), 0.0) for r in options.rate),
    ]
    rows: list[Report] = []
    for kind, rule, temperature in kinds:
        way = _Choices(
            options, target, head, Adaptive(None, Calibrated(tree), widths, compiled=compiled),
            rule, temperature, prompts,
        )  # fmt: skip
        fixed = {
            ("tree" if name == "drafter" else name, drafts): way.steps(option=index)
            for index, (name, drafts) in enumerate(way.proposer.options)
        }
        # The chains of the tree are the same ones, but it may lack some of them.
        lacking = [width for width in chains if width > 1 and ("chain", width - 1) not in fixed]
        if lacking:
            others = Adaptive(None, chain, chains)
            more = _Choices(options, target, head, others, rule, temperature, prompts)
            fixed |= {
                ("chain", width - 1): more.steps(option=chains.index(width)) for width in lacking
            }
        for token in options.token:
            for draft in options.draft_cost:
                times = {
                    (name, drafts): way.time(token, draft, drafts, drafts + 1) * count.sum(1)
                    for (name, drafts), count in fixed.items()
                }
                best = min(times, key=lambda option: times[option].sum())
                own = way.costs(token, draft)
                spent = way.steps(own) @ own
                over_best = interval(times[best], spent)
                assert over_best is not None, "a step takes time"
                rows.append(
                    {"acceptance": kind, "token": token, "draft_cost": draft,
                     "best": f"{best[0]} of {best[1]}" if best[1] else "plain",
                     "over_best": over_best,
                     "over_plain": float(times["plain", 0].sum() / spent.sum())}
                )  # fmt: skip
                print(rows[-1], flush=True)
    return rows


class _Choices:
    """Texts of an `Adaptive` proposer, whose steps are counted by prompt and option."""

    def __init__(
        self, options: TreesOptions, target: specjax.LanguageModel, head: Drafter,
        proposer: Adaptive, rule: Rule, temperature: float, prompts: Sequence[Sequence[int]],
    ) -> None:  # fmt: skip
        self.proposer, self._prompts, self._new = proposer, prompts, options.new_tokens
        self._keys = options.keys
        self._temperature = temperature
        self._decoder, self._params = _decoder(options, target, head, rule, prompts, proposer)

    def time(self, token: float, draft: float, drafts: int, nodes: int) -> float:
        """Returns the time of a step of `drafts` in a pass over `nodes`, by the model of costs."""
        return 1 + token * nodes + draft * min(drafts, self.proposer.max_depth)

    def costs(self, token: float, draft: float) -> np.ndarray:
        """Returns [O]: the time of a step with each option, in the next pass that reads it."""
        return np.array(
            [
                self.time(token, draft, drafts, min(n for n in self.proposer.passes if n > drafts))
                for _, drafts in self.proposer.options
            ],
            np.float32,
        )

    def steps(self, costs: np.ndarray | None = None, option: int = MEASURED) -> np.ndarray:
        """Returns [P, O]: the steps with each option, chosen by costs, or all of them with one."""
        known = np.ones(len(self.proposer.options), np.float32) if costs is None else costs
        learned = Learned(known, np.array([0.5, 0.4]), 0.0)
        counts = np.zeros((len(self._prompts), len(known)), np.int64)
        sizes = () if self.proposer.is_chain else (self.proposer.widths, self.proposer.chain_widths)
        nothing = [jnp.zeros((len(each), 2), jnp.float32) for each in sizes]
        own = AdaptiveParams(
            lookup=None, drafter=self._params.proposer, seconds=jnp.asarray(known, jnp.float32),
            forced=jnp.array(option, jnp.int32), prior=jnp.zeros(2, jnp.float32),
            pause=jnp.zeros(2, jnp.int32),
            **dict(zip(("trees", "chains"), nothing, strict=False)),
        )  # fmt: skip
        for number in range(self._keys * len(self._prompts)):
            at = number % len(self._prompts)
            prompt, params = self._prompts[at], learned.put(Params(self._params.target, own))
            state = self._decoder.prefill(
                params, np.array([prompt], np.int32), np.array([len(prompt)], np.int32),
                limit=np.array([len(prompt) + self._new], np.int32),
                sampling=specjax.Sampling.create(1, temperature=self._temperature),
                key=jax.random.split(specjax.make_key(number), 1),
            )  # fmt: skip
            if option != MEASURED:
                state = self._decoder.run(params, state)
                counts[at, option] += int(state.stats.target_passes.sum())
                continue
            while not bool(state.done.all()):
                state = self._decoder.run(params, state, 1)
                counts[at, self._option(state.proposer)] += 1
            learned.learn(state)
        return counts

    def _option(self, state: AdaptiveState) -> int:
        drafts = int(state.offered.max())
        if drafts == 0:
            return 0
        width = next(width for width in self.proposer.widths if width > drafts)
        chain = state.last is not None and bool(state.last.chain.any())
        return self.proposer.options.index(("chain" if chain else "drafter", width - 1))


def _loaded(
    options: TreesOptions,
) -> tuple[specjax.LanguageModel, list[list[int]], Drafter]:
    target = specjax.load(options.target, "float32")
    prompts = encode_file(target, pathlib.Path(options.prompts))
    return target, prompts, arrange(specjax.load_drafter(options.drafter, target), options.depth)


def _decoder(
    options: TreesOptions, target: specjax.LanguageModel, drafter: Drafter, rule: Rule,
    prompts: Sequence[Sequence[int]], proposer: Proposer | None = None,
) -> tuple[specjax.Decoder, Params]:  # fmt: skip
    made = drafter.proposer if proposer is None else proposer
    room = max(max(map(len, prompts)) + options.new_tokens, made.num_nodes)
    # Without an end of text, since texts of another acceptance would end elsewhere.
    decoder = specjax.Decoder(target.model, made, rule, (), room)
    rows = len(prompts) if proposer is None else 1
    return decoder, Params(target.params, drafter.arrays(target, rows))


def main(argv: list[str] | None = None) -> None:
    options = parse(TreesOptions, argv, __doc__, "python -m bench.trees")
    if options.plot:
        new_figure()  # fails now, not after the tables, if matplotlib is missing
    if options.read:
        known = json.loads(pathlib.Path(options.read).read_text())
        first, second = known["counted"], known["chosen"]
    else:
        first = counted(options) if options.limit_prompts else []
        second = chosen(options) if options.chosen_prompts else []
    print(table(first, second))
    if options.json:
        text = json.dumps({"counted": first, "chosen": second}, indent=1)
        pathlib.Path(options.json).write_text(text + "\n")
    if options.plot:
        draw(second).savefig(options.plot)


def draw(rows: Sequence[Report]) -> Figure:
    """Draws the speed over plain decoding of the choice and of the best fixed form."""
    figure = new_figure(3 + len(rows) / 3, 4)
    axes = figure.subplots()
    best = [r["over_plain"] / r["over_best"][0] for r in rows]
    axes.bar(range(len(rows)), best, color="lightgrey", label="best fixed chain or tree")
    axes.plot(
        range(len(rows)), [r["over_plain"] for r in rows], "o", label="chosen in every step"
    )  # fmt: skip
    axes.axhline(1, color="grey", linewidth=0.8)
    names = [f"{r['acceptance']}, {r['draft_cost']:g}" for r in rows]
    axes.set_xticks(range(len(rows)), names, rotation=60, ha="right", fontsize=8)
    axes.set_ylabel("speed over plain decoding")
    axes.set_title("acceptance, and passes of the target that a level of drafts takes", fontsize=9)
    axes.legend()
    return figure


def table(first: Sequence[Report], second: Sequence[Report]) -> str:
    """Returns both tables as Markdown, and the mean and the least of the second."""
    lines = ["| nodes | rule | temperature | form | tokens a pass |", "|" + "---|" * 5]
    lines = lines if first else []
    lines += [
        f"| {r['nodes']} | {r['rule']} | {r['temperature']:g} | {r['form']} "
        f"| {r['tokens_per_pass']:.3f} |"
        for r in first
    ]
    if second:
        head = "| acceptance | token | draft cost | best fixed | over the best | over plain |"
        lines += ["", head, "|" + "---|" * 6]
        lines += [
            f"| {r['acceptance']} | {r['token']:g} | {r['draft_cost']:g} | {r['best']} "
            f"| {show(r['over_best'], '.3f')} | {r['over_plain']:.3f} |"
            for r in second
        ]
        least = min((r["over_best"] for r in second), key=lambda each: each[0])
        mean = sum(r["over_best"][0] for r in second) / len(second)
        below = sum(r["over_best"][0] < 0.98 for r in second)
        surely = sum(r["over_best"][2] < 0.98 for r in second)
        lines += [
            "",
            f"over the best: mean {mean:.3f}, least {show(least, '.3f')}",
            f"below 0.98: {below} of {len(second)}; with the whole interval: {surely}",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    run(main)
