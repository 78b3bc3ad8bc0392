"""`tune` measures, tells and saves; `generate` reads what it saved, and refuses damaged files."""

import dataclasses
import json
import sys
import warnings

import folders
import numpy as np
import packed_folders
import pytest
from preparing import prepared

import specjax
from specjax.cli import main, serve
from specjax.drafters import automatic, on_demand
from specjax.generation import tuning
from specjax.generation.warmup import place, warm_up
from specjax.options.models import Models, drafting
from specjax.proposers import Adaptive, CostAware
from specjax.tuning import (
    Candidate,
    Learned,
    Plan,
    Tree,
    about,
    fastest_tree,
    read_plan,
    saved_plan,
    weights_of,
)


@pytest.fixture(scope="module")
def target():
    return specjax.load(folders.target())


@pytest.fixture(scope="module")
def draft():
    return specjax.load(folders.draft())


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    sys.modules["specjax.generation.warmup"]._compiled.clear()
    return tmp_path / "cache" / "plans"


def key_of(call, *more):
    """The key of the plan of a prepared call."""
    return about(call.decoder, weights_of(call.target, call.drafter), *more)


PROMPTS, HOW = ["the cat the cat", "a dog"], {"max_new_tokens": 12, "rounds": 2}


def test_a_plan_is_told_and_saved_and_read(target, draft, cache, monkeypatch):
    """All options are candidates with equal texts; a later call starts from the file."""
    plan = specjax.tune(target, draft, PROMPTS, **HOW)
    names = [one.name for one in plan.candidates]
    assert names == [
        "plain", "lookup of 2", "lookup of 4", "lookup of 8",
        "drafter of 2", "drafter of 4", "drafter of 8", "auto",
    ]  # fmt: skip
    assert plan.candidates[0].tokens_per_pass == 1.0
    assert all(one.predicted > 0 for one in plan.candidates[:-1])
    told = str(plan)
    assert all(name in told for name in names) and 'proposer="auto"' in told
    assert [plan.path] == list(cache.iterdir())
    saved = json.loads(plan.path.read_text())
    assert saved["about"]["jax"] and saved["seconds"] == list(plan.seconds)

    module = sys.modules["specjax.generation.warmup"]
    module._compiled.clear()
    monkeypatch.setattr(module, "seconds_by_context", None)  # nothing is measured now
    out = specjax.generate(target, PROMPTS[:1], draft=draft, max_new_tokens=12)
    assert out.choices.seconds.tolist() == list(plan.seconds)
    assert (
        out.tokens
        == specjax.generate(target, PROMPTS[:1], proposer="none", max_new_tokens=12).tokens
    )


def test_every_step_of_an_option_takes_it_or_none(target, draft):
    """What is measured as an option is that option, and not what is fastest."""
    how = {"max_new_tokens": 48, "eos": []}
    (text,) = specjax.generate(target, PROMPTS[:1], proposer="none", **how).tokens
    # The lookup finds the text in a document.
    whole = on_demand(automatic(target, draft), False)
    call = prepared(target, PROMPTS[:1], drafter=whole, documents=[text], **how)
    options = call.decoder.proposer.options
    learned = warm_up(call).learned
    for index, (name, depth) in enumerate(options):
        way = tuning._Way("", [place(call)], tuning._only(learned, index))
        way.run_first()
        taken = {options[option] for option in way.steps}
        # A part has few drafts near the end of a text, and the lookup where nothing matches.
        assert all(other == "plain" or deep <= depth for other, deep in taken)
        assert (name, depth) in taken
        assert name == "drafter" or {other for other, _ in taken} <= {"plain", name}
        if (name, depth) == ("drafter", 2):
            # Most drafts are right, but they are those of the lookup.
            before = learned.prior[1]
            tuning._learn(learned, way, (name, depth))
            judged, accepted = way.judged[1]
            assert judged < way.judged[0, 0]
            rate = accepted / judged if judged else before
            assert learned.prior[1] == pytest.approx(rate) and rate < 0.9
            assert way.judged[0, 1] / way.judged[0, 0] > 0.9


def test_a_longer_context_has_another_plan(target):
    """By powers of two from 1024 tokens: a long text makes drafts of a model cost more."""
    call = prepared(target, PROMPTS)
    assert call.context == max(map(len, call.prompt[:, : call.lengths.max()])) + call.new
    keys = {context: key_of(call, 2, False, context) for context in
            (call.context, 1024, 1025, 2048, 3000, 131072)}  # fmt: skip
    assert [key["context"] for key in keys.values()] == [1024, 1024, 2048, 2048, 4096, 131072]
    plan = Plan(keys[1024], (1.0, 1.1, 1.2, 1.3), (0.5, 0.4), ())
    plan.save()
    assert isinstance(read_plan(keys[call.context]), Learned)
    assert read_plan(keys[2048]) is None
    longer = Plan(keys[3000], (1.0, 2.1, 2.2, 2.3), (0.5, 0.4), ())
    longer.save()
    # The context without a plan has the seconds of the longer one.
    rows = [plan.seconds, longer.seconds, longer.seconds]
    assert read_plan(keys[3000]).longer.tolist() == list(map(list, rows))
    assert read_plan(keys[call.context]).longer is None


def test_another_model_or_number_of_rows_has_another_plan(target, draft):
    keys = [
        key_of(prepared(target, prompts, **more), len(prompts), samples)
        for prompts, more, samples in (
            (PROMPTS, {}, False),
            (PROMPTS, {}, True),
            (PROMPTS * 2, {}, False),
            (PROMPTS, {"draft": draft}, False),
        )
    ]
    assert len({Plan(key, (), (0.0, 0.0), ()).path for key in keys}) == 4
    assert all(read_plan(key) is None for key in keys)


def test_each_kind_of_weights_has_its_own_plan(cache):
    """A folder with packed weights is tuned as it is and dequantised: steps cost differently."""
    llama = folders.random_llama(hidden_size=64, intermediate_size=96)
    folder = folders.write(packed_folders.packed(llama, "gptq"), "tuned")
    plans = {}
    for more in ([], ["--dequantise"]):
        main(["tune", "the cat", "--target", str(folder), "--max-new-tokens", "8", "--rounds", "1",
              *more])  # fmt: skip
        (made,) = set(cache.iterdir()) - set(plans.values())
        plans[bool(more)] = made
    for dequantise, path in plans.items():
        target = specjax.load(folder, dequantise=dequantise)
        found = tuning.plan_of(target, None, batch=1, temperature=0.0)
        assert found is not None and found.path == path


def test_a_plan_that_does_not_name_its_weights_is_told_once(target, cache):
    """Files of earlier versions have no weights; they are not used, and tuning ends the warning."""
    call = prepared(target, PROMPTS[:1])
    key = key_of(call, 1, False)
    earlier = {name: value for name, value in key.items() if name != "weights"}
    old = Plan(earlier, (1.0, 1.1, 1.2, 1.3), (0.5, 0.4), ()).save()
    with pytest.warns(UserWarning, match=f"{old} .*of what weights .*run specjax tune again"):
        assert read_plan(key) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_plan(key) is None


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", '{"seconds": [1]}', "seconds", "awake", "other"],
)
def test_a_damaged_plan_is_told_and_made_anew(target, damage, cache):
    key = key_of(prepared(target, PROMPTS), 2, False)
    plan = Plan(key, (1.0, 1.1, 1.2, 1.3), (0.5, 0.4), (), awake=0.2)
    plan.save()
    assert read_plan(key).awake == 0.2
    whole = json.loads(plan.path.read_text())
    earlier = {name: value for name, value in whole.items() if name != "awake"}
    plan.path.write_text(json.dumps(earlier))  # it never rested
    assert read_plan(key).awake == 0.0
    if damage == "awake":
        damage = json.dumps({**whole, "awake": 2.0})
    if damage == "seconds":
        damage = json.dumps({**whole, "seconds": [1.0, -1.0, 2.0, 3.0]})
    if damage == "other":
        damage = json.dumps({**whole, "about": {**key, "jax": "0.0"}})
    plan.path.write_text(damage)
    with pytest.warns(UserWarning, match=r"the plan .*cannot be used .*a new one is made"):
        assert read_plan(key) is None


def test_the_advice_says_when_drafts_lose():
    slow = Plan({}, (), (0.0, 0.0), (Candidate("plain", 1, 9, 9.0), Candidate("auto", 1, 8, 8.0)))
    fast = Plan({}, (), (0.0, 0.0), (Candidate("plain", 1, 9, 9.0), Candidate("auto", 1, 8, 10.0)))
    assert "Nothing was faster than plain decoding" in slow.advice()
    assert "The fastest is auto" in fast.advice()
    assert slow.best.name == "plain" and fast.best.name == "auto"


SECONDS = (1.0, 1.3, 1.6, 2.0, 1.4, 1.8, 2.6)


@pytest.mark.parametrize(
    "tokens, option, names, default",
    [
        ((1, 1.3, 1.6, 2.08, 1.4, 1.8, 2.6), ("plain", 0), [], None),  # gains 4 % at most
        ((1, 1.2, 1.8, 2.0, 1.5, 1.9, 2.6), ("lookup", 4), ["lookup"], "lookup"),
        ((1, 1.2, 1.3, 1.4, 1.9, 2.1, 2.2), ("drafter", 2), ["lookup", "draft"], "lookup+draft"),
    ],
)
def test_a_server_starts_from_a_plan(target, draft, tokens, option, names, default, capsys):
    """Where every step is as wide as its option, which one gains most; none without a plan."""
    slots = 4
    assert serve.by_plan(target, draft, slots) == ({}, None)
    assert f"there is no plan for {slots} slots" in capsys.readouterr().err
    # The target has no temperature of its own, so requests that name none have that of OpenAI.
    call = prepared(target, PROMPTS * 2, draft=draft, proposer="auto", temperature=1.0)
    candidates = tuple(Candidate(str(tau), tau, 1.0, 1.0) for tau in (*tokens, 9.0))
    plan = Plan(key_of(call, slots, True), SECONDS, (0.5, 0.4), candidates)
    plan.save()
    assert plan.fixed() == option
    loaded, first = serve.by_plan(target, draft, slots)
    assert (list(loaded), first) == (names, default)
    assert all(each.proposer.max_depth == option[1] for each in loaded.values())
    assert ("do not pay" in capsys.readouterr().err) == (not names)
    assert serve.by_plan(target, draft, 5) == ({}, None)


def test_other_drafters_and_own_text(target):
    """Without prompts the target writes some; a tree has a program of its own."""
    tree = specjax.make_drafter(target, target, specjax.StaticTree, branching=(2, 1))
    plan = specjax.tune(target, [tree], max_new_tokens=8, rounds=1, batch=2, save=False)
    names = [one.name for one in plan.candidates]
    assert names[-2].startswith("StaticTree of") and names[-1] == "auto"
    assert plan.candidates[-2].tokens_per_pass > 2


@pytest.fixture(scope="module")
def tree(target, draft):
    return specjax.make_drafter(target, draft, specjax.DynamicTree, depth=2, width=2, num_nodes=4)


COSTS = {1: 1.0, 3: 1.01, 4: 1.02}


def plan_of_tree(target, tree, chosen, rows=1, **more):
    """A plan for what "auto" makes of the chains of `tree`."""
    how = {"max_new_tokens": 12, "temperature": 0.0, "proposer": "auto", **more}
    call = prepared(target, PROMPTS[:1] * rows, drafter=tree, **how)
    assert isinstance(call.decoder.proposer, Adaptive)
    key = key_of(call, rows, how["temperature"] > 0)
    plan = Plan(
        key, tuple(1.0 + 0.1 * depth for _, depth in key["options"]), (0.5, 0.4), (), chosen
    )
    plan.save()
    return plan


def by_auto(target, tree, **more):
    how = {"max_new_tokens": 12, "temperature": 0.0, **more}
    return prepared(target, PROMPTS[:1], drafter=tree, proposer="auto", **how).decoder.proposer


@pytest.mark.parametrize("costs", [COSTS, None])
def test_auto_decodes_with_the_tree_of_a_plan(target, tree, costs):
    """With the costs of the plan or as it is; the text is that of plain decoding."""
    plan = plan_of_tree(target, tree, Tree.of(tree, costs))
    assert saved_plan(plan.about) == plan
    proposer = by_auto(target, tree)
    assert (proposer if costs is None else proposer.inner) == tree.proposer
    assert costs is None or proposer == CostAware(tree.proposer, tuple(costs))
    how = {"max_new_tokens": 12, "temperature": 0.0}
    made = specjax.generate(target, PROMPTS[:1], drafter=tree, proposer="auto", **how)
    plain = specjax.generate(target, PROMPTS[:1], proposer="none", **how)
    assert made.tokens == plain.tokens
    assert made.choices is None and made.stats.mean_accepted_length > 1


@pytest.mark.parametrize("why", ["auto", "earlier", "rows", "samples", "drafter", "nodes"])
def test_auto_follows_no_plan_of_another_kind(target, draft, tree, why):
    """One in which a tree is not the fastest, or one of other rows, settings, or drafters."""
    chosen = None if why in ("auto", "earlier") else Tree.of(tree, COSTS)
    if why == "drafter":
        other = specjax.make_drafter(
            target, draft, specjax.DynamicTree, depth=2, width=3, num_nodes=4
        )
        chosen = Tree.of(other, COSTS)
    if why == "nodes":
        chosen = dataclasses.replace(chosen, seconds=((1, 1.0), (5, 1.5)))
    more = {"temperature": 0.8} if why == "samples" else {}
    plan = plan_of_tree(target, tree, chosen, rows=2 if why == "rows" else 1, **more)
    if why == "earlier":  # files of earlier versions have no tree
        kept = json.loads(plan.path.read_text())
        del kept["tree"]
        plan.path.write_text(json.dumps(kept))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(by_auto(target, tree), Adaptive)


def test_auto_follows_no_tree_in_a_call_that_it_does_not_suit(target, tree):
    plan_of_tree(target, tree, Tree.of(tree, COSTS))
    for more in ({"num_drafts": 2}, {"documents": [["the dog"]]}):
        assert isinstance(by_auto(target, tree, **more), Adaptive)
    with pytest.raises(ValueError, match="with the rule Rejection"):
        by_auto(target, tree, rule="rejection")
    with pytest.raises(ValueError, match="temperature=-1"):
        by_auto(target, tree, temperature=-1)


def test_the_command_of_generate_follows_a_plan(target, tmp_path):
    """With the folder of a drafter, and without numbers of its chains."""
    made = specjax.MedusaAdapter.create(target, 2)
    heads = dataclasses.replace(made, choices=((0,), (1,), (0, 0)))
    specjax.save_medusa(tmp_path / "heads", heads, "target")
    loaded = specjax.load_drafter(tmp_path / "heads", target)
    plan_of_tree(target, loaded, Tree.of(loaded))
    for more, proposer in (({}, loaded.proposer), ({"num_drafts": 2}, None)):
        folder = str(tmp_path / "heads")
        passed = drafting("auto", Models(target, None, folder, folder), more, "match")
        how = {"max_new_tokens": 12, "temperature": 0.0, **passed}
        chosen = prepared(target, PROMPTS[:1], **how).decoder.proposer
        assert chosen == proposer if proposer else isinstance(chosen, Adaptive)


@pytest.mark.parametrize(
    "damage",
    [
        "x", [], {}, {"depth": 3}, {"seconds": 3}, {"seconds": []}, {"seconds": [[4, -1.0]]},
        {"seconds": [[4, 1.0], [3, 1.0]]}, {"seconds": [[4]]}, {"name": 3}, {"structure": None},
    ],
)  # fmt: skip
def test_a_damaged_tree_is_told_once(target, tree, damage):
    """Then `auto` is as it is without a plan."""
    plan = plan_of_tree(target, tree, Tree.of(tree, COSTS))
    kept = json.loads(plan.path.read_text())
    whole = isinstance(damage, dict) and damage
    kept["tree"] = {**kept["tree"], **damage} if whole else damage
    plan.path.write_text(json.dumps(kept))
    with pytest.warns(UserWarning, match=r"the plan .*cannot be used .*a new one is made"):
        assert isinstance(by_auto(target, tree), Adaptive)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_plan(plan.about) is None


def test_a_tree_has_to_lead():
    """By 3 % over both, and by measured speeds."""
    trees = [Tree(name, "", None) for name in "ab"]

    def chosen(plain, auto, *speeds):
        each = [Candidate(name, 1, None, speed) for name, speed in zip("ab", speeds, strict=True)]
        ends = (Candidate(name, 1, None, speed) for name, speed in (("p", plain), ("auto", auto)))
        return fastest_tree(*ends, list(zip(trees, each, strict=True)))

    assert chosen(90, 100, 104, 105) is trees[1]
    assert chosen(90, 100, 104, None) is trees[0]
    assert chosen(90, 100, 102, 99) is None and chosen(100, 90, 102, 99) is None
    assert chosen(90, None, 104, 105) is None and chosen(None, 90, 104, 105) is None
    assert fastest_tree(*[Candidate("p", 1, 1.0, 1.0)] * 2, []) is None


def test_the_advice_says_what_auto_takes():
    plain, tree, auto = (
        Candidate(name, 1, None, speed)
        for name, speed in (("plain", 9), ("a tree", 20), ("auto", 10))
    )
    chosen = Plan({}, (1.0,), (0.0, 0.0), (plain, tree, auto), Tree("a tree", "", None))
    assert 'fastest is a tree. proposer="auto" with the same drafter decodes' in chosen.advice()
    other = dataclasses.replace(chosen, tree=None)
    assert 'fastest is a tree, and proposer="auto" does not take it' in other.advice()


def test_a_tree_is_measured_with_its_chains(target, tree, monkeypatch):
    """Its chains are inside "auto"; it is a candidate itself, and cut to what pays.

    An earlier plan in which a tree was fastest is not followed by the measurement."""
    earlier = plan_of_tree(target, tree, Tree.of(tree, COSTS))
    judged = []

    def last(plain, auto, trees):
        judged.extend([plain.name, auto.name, *(one.name for _, one in trees)])
        return trees[-1][0]

    monkeypatch.setattr(sys.modules["specjax.generation.tuning"], "fastest_tree", last)
    plan = specjax.tune(target, tree, PROMPTS[:1], max_new_tokens=8, rounds=1)
    name = f"DynamicTree of {tree.name}"
    assert [one.name for one in plan.candidates] == [
        "plain", "lookup of 2", "drafter of 2", name, f"cost-aware {name}", "auto",
    ]  # fmt: skip
    assert judged == ["plain", "auto", name, f"cost-aware {name}"]
    assert plan.path == earlier.path and saved_plan(plan.about) == plan
    assert [nodes for nodes, _ in plan.tree.seconds] == [1, 3, 4]
    assert f"cost-aware {name}" in str(plan)
    assert by_auto(target, tree) == CostAware(tree.proposer, (1, 3, 4))


def test_what_cannot_be_is_refused(target):
    for arguments, words in (
        (("x",), "target='x'"),
        ((target, ["x"]), "drafters='x', of the type str; pass models"),
        ((target, (), []), "prompts is empty"),
    ):
        with pytest.raises(ValueError, match=words):
            specjax.tune(*arguments)
    for name in ("batch", "rounds", "max_new_tokens"):
        with pytest.raises(ValueError, match=f"{name}=0; it must be at least 1"):
            specjax.tune(target, **{name: 0})


def test_the_command(capsys, cache):
    """It prints the table and the file, or JSON."""
    pair = ["--target", str(folders.target()), "--draft", str(folders.draft())]
    few = ["--max-new-tokens", "8", "--rounds", "1"]
    main(["tune", "the cat", *pair, *few])
    printed = capsys.readouterr().out
    (path,) = cache.iterdir()
    assert "drafter of 8" in printed and str(path) in printed
    main(["tune", "the cat", *pair, *few, "--json", "--no-save"])
    found = json.loads(capsys.readouterr().out)
    assert found["best"] in [one["name"] for one in found["candidates"]]
    assert np.isfinite(found["seconds"]).all()
