"""The contracts: parts that miss something fail when they are built; and the verbs of a step."""

import abc
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from toys import TABLES as toys

from specjax import RULES, Decoder, Match, NoProposer, Proposal, Rejection, Verdict
from specjax.contract import BlockSource, Cache, Model, Proposer, Rule, Source
from specjax.methods import DraftSource, MedusaSource
from specjax.proposers import Chain, ChoiceTree, DynamicTree, StaticTree
from specjax.sampling import IndependentDraw
from specjax.tree import Tree

METHODS = {
    Proposer: {"propose"},
    Source: {"bind", "init", "begin", "extend", "read_tree", "end", "observe"},
    BlockSource: {"bind", "init", "marginals", "observe"},
    Model: {"init_cache", "apply"},
    Cache: {"commit", "rewind"},
    Rule: {"__call__"},
}
ATTRIBUTES = {
    Proposer: {"num_nodes": 1, "max_depth": 0, "is_chain": True},
    Source: {"vocab_size": 5},
    BlockSource: {"vocab_size": 5, "depth": 2},
    Model: {"vocab_size": 5, "max_positions": 9, "reads_trees": True},
}
DEFAULTS = {
    Proposer: {"taps": (), "narrower": (), "estimates": False, "shares_cache": False, "scratch": 0,
               "point_mass": False,
               "asks_draft": False, "reads_documents": False, "resumes": False,
               "waits": False, "rests": False, "settles": False, "separable": False},
    Source: {"taps": (), "shares_cache": False, "asks_draft": False, "may_abstain": False,
             "reads_documents": False, "resumes": False, "waits": False},
    BlockSource: {"taps": (), "waits": False, "corrects": False},
    Model: {"num_taps": 0},
    Cache: {"commits_paths": False, "keeps_scratch": False},
    Rule: {"wants_logits": False, "chain_only": False},
}  # fmt: skip


def built(kind, *, methods=None, attributes=None):
    """An instance of a class with these methods and attributes, and nothing else of its own."""
    methods = METHODS[kind] if methods is None else methods
    attributes = ATTRIBUTES.get(kind, {}) if attributes is None else attributes
    said = {"exact": True, "shared_noise": True} if kind is Rule else {}
    body = {name: lambda *_: None for name in methods} | attributes | said
    return type("Mine", (kind,), body)()


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_a_part_that_has_all_is_built(kind):
    """Missing attributes get their defaults, and these methods are all that it must have."""
    assert set(kind.__abstractmethods__) == METHODS[kind]
    made = built(kind)
    assert {name: getattr(made, name) for name in DEFAULTS[kind]} == DEFAULTS[kind]


@pytest.mark.parametrize(
    ("kind", "attribute", "name"),
    [
        (kind, attribute, name)
        for kind in (Proposer, Source, BlockSource)
        for attribute, names in kind.PROMISED.items()
        for name in names
    ],
)
def test_a_promised_method_that_is_missing_fails_when_the_part_is_built(kind, attribute, name):
    """`resumes=True` needs both methods, also where it is declared for one object."""
    promised = set(kind.PROMISED[attribute])
    more = promised - {name}
    said = ATTRIBUTES[kind] | {attribute: True}
    with pytest.raises(TypeError, match=f"{attribute}=True and lacks the method {name}: define it"):
        built(kind, methods=METHODS[kind] | more, attributes=said)

    def declares(self):
        self.declare(**{attribute: True})

    late = {"__init__": declares, **{n: lambda *_: None for n in METHODS[kind] | more}}
    with pytest.raises(TypeError, match=name):
        type("Mine", (kind,), late | ATTRIBUTES[kind])()
    made = built(kind, methods=METHODS[kind] | promised, attributes=said)
    assert getattr(made, attribute) is True


def test_a_proposer_with_a_state_observes():
    """Without a state it needs neither; with one, a text that is not observed would be a fault."""
    assert built(Proposer).init(None, None, 3) == () and built(Proposer).observe(0, (), 0) == ()
    with pytest.raises(TypeError, match=r"Mine has the method init.*lacks observe: define it"):
        built(Proposer, methods=METHODS[Proposer] | {"init"})
    assert built(Proposer, methods=METHODS[Proposer] | {"init", "observe"})


def test_which_methods_are_promised():
    """What the case above runs over."""
    resumes = {"resumes": ("rest", "resume")}
    rests = {"rests": ("resting", "lapse"), "settles": ("settled", "draft")}
    assert Proposer.PROMISED == resumes | rests and Source.PROMISED == resumes
    assert BlockSource.PROMISED == {"corrects": ("correct",)}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in METHODS.items() for name in sorted(names)]
)
def test_a_part_without_a_method_is_not_built(kind, name):
    """Python itself names the missing method, long before anything is traced."""
    with pytest.raises(TypeError, match=rf"Mine.*{name}"):
        built(kind, methods=METHODS[kind] - {name})


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in ATTRIBUTES.items() for name in names]
)
def test_a_part_without_an_attribute_is_not_built(kind, name):
    """The error names the attribute and says how to declare it."""
    with pytest.raises(
        TypeError, match=rf"^Mine lacks {name}: give the class.*declare\({name}="
    ) as caught:
        built(
            kind, attributes={key: value for key, value in ATTRIBUTES[kind].items() if key != name}
        )
    assert not [other for other in ATTRIBUTES[kind] if other != name and other in str(caught.value)]


def test_an_attribute_may_follow_from_the_fields():
    """`declare` in `__post_init__` works; equal fields make equal parts, which jit finds again."""

    @dataclasses.dataclass(frozen=True)
    class Wide(NoProposer):
        times: int = 2

        def __post_init__(self):
            self.declare(max_depth=3 * self.times)

    assert Wide(times=3).max_depth == 9
    assert Wide(times=3) == Wide(times=3) != Wide(times=2)
    assert hash(Wide(times=3)) == hash(Wide(times=3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        Wide().times = 5


@pytest.mark.parametrize(
    ("said", "missing"),
    [
        ({}, "exact and shared_noise"),
        ({"exact": True}, "shared_noise"),
        ({"shared_noise": False}, "exact"),
    ],
)
def test_a_rule_says_what_it_is_when_it_is_defined(said, missing):
    """A rule must say whether it is exact and whether it shares noise; neither has a default."""
    with pytest.raises(TypeError, match=f"^Mine must set {missing}, each to True or False"):
        type("Mine", (Rule,), said)
    with pytest.raises(TypeError, match="must set"):

        class Between(Rule, abc.ABC):
            """An abstract rule that does not say it either."""


@pytest.mark.parametrize("name", ["target", "proposer", "rule"])
@pytest.mark.parametrize("given", ["class", "stranger"])
def test_a_decoder_takes_instances_of_the_contract(name, given):
    """Classes and objects that only look like a part are refused."""
    parts = {"target": toys.model(), "proposer": NoProposer(), "rule": Match()}
    assert Decoder(**parts).capacity == 512
    other = type(parts[name]) if given == "class" else object()
    kind = {"target": "Model", "proposer": "Proposer", "rule": "Rule"}[name]
    called = f"the class {other.__name__}" if given == "class" else "a object"
    with pytest.raises(
        ValueError,
        match=rf"^{name} is {called}; pass an instance of a subclass of specjax.contract.{kind}$",
    ):
        Decoder(**{**parts, name: other})


def test_shapes_take_sources_of_their_kind():
    """A chain asks its source token by token, a tree of choices once; the wrong source is
    refused by name."""
    draft, heads = DraftSource(toys.model(), toys.VOCAB), MedusaSource(toys.OWN)
    for shape, wrong in ((Chain, heads), (Chain, toys.model()), (ChoiceTree, draft)):
        with pytest.raises(ValueError, match=f"source=.*{type(wrong).__name__}.*; pass a"):
            shape(wrong)
    for wrong in (heads, toys.model()):
        with pytest.raises(ValueError, match=f"source=.*{type(wrong).__name__}.*; pass a"):
            StaticTree(wrong, (2, 1))
        with pytest.raises(ValueError, match=f"source=.*{type(wrong).__name__}.*; pass a"):
            DynamicTree(wrong, 2, 2, 4)


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.wants_logits])
def test_drawn_drafts_without_what_they_were_drawn_from_are_refused(rule):
    """They would bias the text as point masses; rules with shared noise need no distribution."""
    tokens, parent = np.array([1, 2, 3], np.int32), np.array([-1, 0, 1], np.int32)
    draw = IndependentDraw(jax.random.key(0), toys.VOCAB, 3)

    def judge(point_mass):
        def verdict(logits):
            proposal = Proposal(jnp.array(tokens), jnp.array(parent), point_mass=point_mass)
            return RULES[rule]()(draw, proposal, Tree.of(proposal.parent, 2), logits)

        return jax.eval_shape(verdict, np.zeros((3, toys.VOCAB), np.float32))

    with pytest.raises(ValueError, match=r"no logits.*context.wants_logits.*point_mass=True"):
        judge(point_mass=False)
    assert judge(point_mass=True).node.shape == ()


@pytest.mark.parametrize(
    ("case", "rule"), [("table static tree", "match"), ("draft 3", "rejection")]
)
def test_a_step_is_propose_verify_commit(case, rule):
    """Compiled one by one, the verbs give the same tokens and counts as a step."""
    dec, arrays = toys.decoder(case, rule), toys.params(case)
    propose, verify, commit = jax.jit(dec.propose), jax.jit(dec.verify), jax.jit(dec.commit)
    bounds = np.array([9, 1, 2, 0], np.int32)
    state, steps = toys.prefill(dec, arrays, temperature=[1.0, 0.0, 0.7, 1.0], num_drafts=bounds), 0
    whole = dec.run(arrays, jax.tree.map(jnp.array, state))
    while not state.done.all():
        before, cached = np.asarray(state.length), np.asarray(state.cache.length)
        proposal, state = propose(arrays, state)
        checked = verify(arrays, state, proposal)
        np.testing.assert_array_equal(state.length, before)
        np.testing.assert_array_equal(state.cache.length, cached)
        assert checked.logits.shape == (*proposal.tokens.shape, toys.VOCAB)
        deep = np.where(np.asarray(checked.tree.parent) >= 0, checked.tree.depth, 0)
        assert (deep <= bounds[:, None]).all()
        state, info = commit(arrays, state, proposal, checked)
        np.testing.assert_array_equal(info.verdict.node, checked.verdict.node)
        np.testing.assert_array_equal(info.proposal.parent, checked.tree.parent)
        assert (info.num_accepted <= bounds).all()
        steps += 1
    assert steps > 5
    assert toys.texts(state) == toys.texts(whole)
    jax.tree.map(np.testing.assert_array_equal, state.stats, whole.stats)


def test_any_proposal_may_be_verified():
    """Under shared noise a text does not depend on drafts, so inserted foreign drafts change
    nothing."""
    dec, arrays = toys.decoder("table chain", "match"), toys.params("table chain")
    propose, verify, commit = jax.jit(dec.propose), jax.jit(dec.verify), jax.jit(dec.commit)
    state, rng, rejected = toys.prefill(dec, arrays, temperature=1.0), np.random.default_rng(0), 0
    while not state.done.all():
        proposal, state = propose(arrays, state)
        other = rng.integers(0, toys.VOCAB, proposal.tokens[:, 1:].shape, dtype=np.int32)
        proposal = dataclasses.replace(proposal, tokens=proposal.tokens.at[:, 2:].set(other[:, 1:]))
        state, info = commit(arrays, state, proposal, verify(arrays, state, proposal))
        rejected += int((info.num_accepted == 1).sum())
    assert rejected > 5
    assert toys.texts(state) == toys.decoded("none", "match", 1.0)[0]


@struct.dataclass
class Lenient(Rule):
    """A user's rule with a number: it accepts a draft whose probability is at least `least`."""

    least: float = 0.5

    exact = False
    shared_noise = True

    def __call__(self, draw, proposal, tree, logits):
        probs = jax.nn.softmax(logits)[jnp.maximum(proposal.parent, 0), proposal.tokens]
        kept = ((proposal.parent >= 0) & (probs >= self.least)).at[0].set(True)
        node = jnp.argmax(jnp.where((kept | ~tree.ancestors).all(-1), tree.depth, -1)).astype(
            jnp.int32
        )
        noise = draw.noise(node[None], tree.depth[node][None])[0]
        return Verdict(node, jnp.argmax(logits[node] + noise).astype(jnp.int32))


def test_a_rule_of_ones_own_is_a_rule():
    """A user's rule of twenty lines works, and its number is data."""

    def run(least):
        dec = Decoder(
            toys.model(), toys.CASES["tree"][0], Lenient(least), (toys.EOS,), toys.CAPACITY
        )
        return dec.run(toys.params("tree"), toys.prefill(dec, toys.params("tree"), temperature=1.0))

    wanted, lenient = toys.decoder("tree", "threshold"), run(0.3)
    assert wanted.rule.threshold == 0.3
    assert toys.texts(lenient) == toys.decoded("tree", "threshold", 1.0)[0]
    assert run(1.1).stats.accepted.sum() == 0 < lenient.stats.accepted.sum()


def test_decoders_with_equal_rules_are_equal():
    """A rule without numbers is compared by value."""
    one = Decoder(toys.model(), NoProposer(), Match())
    assert one == Decoder(toys.model(), NoProposer(), Match()) and hash(one) == hash(
        dataclasses.replace(one)
    )
    assert one != Decoder(toys.model(), NoProposer(), Rejection())
