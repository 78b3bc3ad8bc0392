"""Draft and target at the same time: the text stays the same, and both work at once.

Several devices need a process of their own: see `overlapped.py` and `overlapped_in_processes.py`.
"""

import signal
import subprocess
import sys
import time

import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from several_devices import ROOT, environment
from test_processes import free_port
from test_sharding import on_eight
from toys import TRANSFORMERS as toys

import specjax
from specjax.cli import main
from specjax.overlap import Foresight, Overlapped
from specjax.overlap.pace import FIRST, Pace
from specjax.parallel import make_mesh
from specjax.tree import Tree
from specjax.types import Verdict


@pytest.mark.parametrize("options", [(), pytest.param(("--all",), marks=pytest.mark.slow)])
def test_texts_are_those_of_the_sequential_loop(options):
    """The same key gives the same tokens and figures, in any order of rows, in chunks, and for
    inserted rows; on 2 + 2 and 1 + 3 devices, and with `--all` on 4 + 4."""
    on_eight("tests/overlapped.py", *options)


def test_both_programs_run_at_once():
    """A profile of two devices shows passes of the draft inside of passes of the target."""
    on_eight("tests/overlapped.py", "--trace")


def test_generate_and_the_command(tmp_path):
    """`generate(draft_mesh=)` and `--draft-mesh` write the same text, and say how many proposals
    were ready; a draft that the mesh does not divide is laid whole; meshes may leave devices."""
    on_eight("tests/overlapped.py", "--generate", str(tmp_path))


def test_two_processes(tmp_path):
    """In two processes, each with the devices of one side, both have the text of one device; if one
    is killed, the other ends within 30 seconds and says so."""
    address, files = f"localhost:{free_port()}", [tmp_path / "0", tmp_path / "1"]
    both = []
    for n, file in enumerate(files):
        command = [sys.executable, "tests/overlapped_in_processes.py", address, str(n)]
        with open(file, "w") as complained:
            both.append(
                subprocess.Popen(
                    command, stderr=complained, stdout=complained, cwd=ROOT, env=environment(2, 2)
                )
            )
    try:
        ends = time.monotonic() + 400
        while not all("going on" in file.read_text() for file in files):
            assert time.monotonic() < ends, "".join(file.read_text() for file in files)
            assert [p.poll() for p in both] == [None, None], files[0].read_text()
            time.sleep(0.2)
        both[1].send_signal(signal.SIGKILL)
        began = time.monotonic()
        assert both[0].wait(60) == 2, files[0].read_text()
        assert time.monotonic() - began < 30
    finally:
        for process in both:
            process.kill()
            process.wait()
    message = files[0].read_text()
    assert "process 1 of 2 is gone" in message, message
    assert "Check failure stack trace" not in message


@pytest.mark.slow
def test_generate_in_two_processes(tmp_path):
    """`generate(draft_mesh=)` and `--draft-mesh` write the text of one device, with the target in
    one process and the draft in the other; without a mesh of the target they are
    refused."""
    address, files = f"localhost:{free_port()}", [tmp_path / "0", tmp_path / "1"]
    both = []
    for n, file in enumerate(files):
        command = [sys.executable, "tests/overlapped_in_processes.py", address, str(n)]
        with open(file, "w") as told:
            both.append(
                subprocess.Popen(
                    [*command, "--generate"], stderr=told, cwd=ROOT, env=environment(2, 2)
                )
            )
    try:
        ended = [process.wait(900) for process in both]
    finally:
        for process in both:
            process.kill()
            process.wait()
    told = "".join(file.read_text() for file in files)
    assert ended == [0, 0] and told.count("done\n") == 2, told


def test_one_device_takes_turns():
    """On the only device the decoder itself is used, and a warning says so."""
    mesh = make_mesh()
    with pytest.warns(UserWarning, match="share the only device"):
        made = Overlapped(toys.decoder("draft 3", "match"), mesh, mesh)
    state = made.run(toys.params("draft 3"), toys.prefill(made, toys.params("draft 3")))
    assert toys.texts(state) == toys.decoded("draft 3", "match")[0]
    target = specjax.load(folders.target())
    with pytest.warns(UserWarning, match="share the only device"):
        out = specjax.generate(target, "the", draft=target, draft_mesh=mesh, max_new_tokens=4)
    assert out.tokens == specjax.generate(target, "the", max_new_tokens=4).tokens
    assert out.stats.hit_rate is None


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("early exit", "Chain over EarlyExitSource drafts with the target's own layers"),
        ("eagle3", "Chain over Eagle3Source reads the target's hidden states"),
        ("peagle tree", "ChoiceTree over PEagleSource reads the target's hidden states"),
        ("medusa chain", "ChoiceTree over MedusaSource has no draft model"),
        ("block draft", "BlockDraftSource reads the target's hidden states"),
        ("ngram", "NGram has no draft model"),
        ("datastore", "has no draft model"),
        ("none", "NoProposer has no draft model"),
        ("first of", "FirstOf has no draft model"),
        ("adaptive", "Adaptive has no draft model"),
    ],
)
def test_what_cannot_be_separated(case, message, two):
    """A proposer that needs the target to draft is refused by name, and the cure is named."""
    with pytest.raises(ValueError, match=message) as caught:
        Overlapped(toys.decoder(case, "match"), *two)
    assert "use a chain or a tree over a draft model" in str(caught.value)


class FakeDevice:
    """A device in a mesh that is only looked at."""

    process_index, platform = 0, "cpu"

    def __init__(self, id):
        self.id = id


@pytest.fixture
def two(monkeypatch):
    """Two meshes, of which nothing is used but which devices they have."""
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    return tuple(Mesh(np.array([FakeDevice(n)]), ("data",)) for n in (0, 1))


def test_bad_input(two):
    """Meshes that share devices or have none, and other arguments, are refused by name."""
    decoder, (one, other) = toys.decoder("draft 3", "match"), two
    both = Mesh(np.array([one.devices[0], other.devices[0]]), ("data",))
    for meshes, message in (
        ((one, both), "share 0: each device"),
        ((one, one), "share 0: each device"),
        ((None, one), "draft_mesh=None"),
        ((one, "data=2"), "target_mesh='data=2'"),
        ((Mesh(np.empty((0,), object), ("data",)), one), "draft_mesh has no devices"),
    ):
        with pytest.raises(ValueError, match=message):
            Overlapped(decoder, *meshes)
    with pytest.raises(ValueError, match="outcomes=0"):
        Overlapped(decoder, one, other, outcomes=0)
    with pytest.raises(ValueError, match="decoder="):
        Overlapped("decoder", one, other)
    with pytest.raises(ValueError, match="draft_mesh='x', of the type str; pass the mesh"):
        specjax.generate(specjax.load(folders.target()), "the", draft_mesh="x")


def test_the_command_refuses(capsys):
    """`--draft-mesh` needs a draft model."""
    with pytest.raises(SystemExit):
        main(["generate", "the", "--draft-mesh", "model=1", "--proposer", "ngram"])
    assert "--draft-mesh is used with a draft model" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["generate", "the", "--draft-mesh", "rows=1"])
    assert "must look like data=2,model=4" in capsys.readouterr().err


def test_probabilities_of_ends():
    """The estimated ends of a tree sum to 1, and follow what was counted."""
    parent = jnp.array([[-1, 0, 0, 1, 1], [-1, 0, -1, 1, -1]], jnp.int32)
    tree = jax.vmap(lambda row: Tree.of(row, 2))(parent)
    foresight = Foresight.create(2, 5, 4)
    ends = np.asarray(foresight.ends(tree))
    np.testing.assert_allclose(ends.sum(1), 1, rtol=1e-6)
    assert (ends[1, [2, 4]] == 0).all(), "absent nodes cannot be accepted"
    live = jnp.array([True, False])
    verdict = Verdict(jnp.array([3, 3]), jnp.array([0, 0]))
    for _ in range(50):
        foresight = foresight.observe(tree, verdict, live)
    blind = Foresight.create(2, 5, 4, live)  # guesses of the first row lack the noise
    np.testing.assert_allclose(blind.right[1], 2 * blind.right[0])
    ends = np.asarray(foresight.ends(tree))
    assert ends[0, 3] > 0.8 and ends[0].argmax() == 3
    np.testing.assert_allclose(ends[1], np.asarray(Foresight.create(2, 5, 4).ends(tree))[1])


@pytest.mark.parametrize("best", [0, 1, 2])
def test_the_pace_finds_the_fastest_way(best):
    """After a few steps of each way the fastest is taken, and the others are tried now and then."""
    pace, taken = Pace(3), []
    for _ in range(2000):
        way = pace.next()
        taken.append(way)
        pace.record(way, 1.0 if way == best else 1.5)
    assert pace.chosen == best
    tried = [way for way in taken[3 * FIRST :] if way != best]
    assert 0 < len(tried) < 0.03 * len(taken)
    assert set(taken) == {0, 1, 2}


def test_the_pace_compares_means():
    """A way with steps of two lengths is judged by their mean, and a pause counts little."""
    rng, pace = np.random.default_rng(0), Pace(2)
    chosen = []
    for step in range(6000):
        way = pace.next()
        seconds = 1.6 if way else 1.0 + 0.8 * (rng.random() < 0.55)  # mostly 1.8, 1.44 on average
        pace.record(way, seconds + 50 * (step % 100 == 0))
        chosen.append(pace.chosen)
    assert np.mean(chosen) < 0.1


def test_the_pace_follows_a_change():
    """If another way becomes faster, it is found."""
    pace = Pace(2)
    for step in range(6000):
        way = pace.next()
        pace.record(way, 1.5 if (way == 0) == (step > 1000) else 1.0)
    assert pace.chosen == 1
