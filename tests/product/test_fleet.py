"""A fleet in Ray Serve whose replicas are killed, and workers of Ray Data: the campaigns, small."""

from __future__ import annotations

import pathlib
import socket
import tempfile

import pytest

ray = pytest.importorskip("ray")

import fleet_rows  # noqa: E402
import fleets  # noqa: E402
from command_line import ROOT, TINY  # noqa: E402

from specjax.serve.fleet import deploying, machine  # noqa: E402
from specjax.training.jobs import generate  # noqa: E402


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


# Ray warns of sockets and processes of its own, which it keeps until this process ends.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_cluster_that_was_killed_is_not_joined(monkeypatch):
    """Ray notes the cluster that it started last, and the note outlives a killed cluster."""
    with tempfile.TemporaryDirectory() as folder:  # Ray's sockets need a short path
        monkeypatch.setenv("RAY_TMPDIR", folder)
        note = pathlib.Path(folder, "ray", "ray_current_cluster")
        note.parent.mkdir()
        note.write_text("127.0.0.1:1")
        with machine.joined(1, 1, {}) as started:
            assert started and ray.cluster_resources()["CPU"] >= 3


def test_replicas_may_finish_for_longer_than_ray_waits(monkeypatch):
    """Ray raises after a minute, though replicas have five to finish their requests."""
    now, asked = [0.0], []

    def delete(app: str) -> None:
        asked.append(app)
        if now[0] < 150:
            now[0] += 60
            raise TimeoutError("they were not deleted after 60s")

    monkeypatch.setattr(deploying.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(deploying.serve, "delete", delete)
    deploying._delete(drain=300.0)
    assert len(asked) == 4
    now[0] = 0.0
    with pytest.raises(TimeoutError, match="not deleted"):
        deploying._delete(drain=30.0)
    assert now[0] == 120


@pytest.mark.parametrize("router", ["prefix", "spread"])
def test_streams_survive_replicas(port, router):
    counts, wrong = fleets.campaign(
        requests=60,
        rounds=12,
        replicas=2,
        kill_every=3,
        model="tables",
        router=router,
        port=port,
        seed=5,
    )
    assert wrong == []
    assert counts["replicas killed"] and counts["resumed"] and not counts["lost"]


def test_other_weights_are_found(port):
    """Planted: each replica has weights of its own, so no stream may go on elsewhere."""
    counts, wrong = fleets.campaign(
        requests=40, rounds=12, replicas=2, kill_every=3, model="tables", planted=True, port=port
    )
    assert wrong == []
    assert counts["streams that ended with an error"] == counts["lost"] > 0


def test_rows_survive_workers():
    counts = fleet_rows.campaign(count=400, kills=2, workers=2, every=0.5, part=8)
    assert counts["differences"] == 0 and counts["workers killed"] == 2


def test_a_dataset_of_several_workers_is_that_of_one(tmp_path):
    given = ["--target", str(TINY / "target"), "--data", str(ROOT / "specjax" / "rules"),
             "--sequences", "10", "--prompt-tokens", "8", "--max-new-tokens", "12",
             "--batch-size", "4"]  # fmt: skip
    one, several = tmp_path / "one", tmp_path / "several"
    generate.main([*given, "--out", str(one)])
    generate.main([*given, "--out", str(several), "--ray-workers", "2"])
    shards = sorted(path.name for path in one.glob("*.safetensors"))
    assert len(shards) == 3
    for name in [*shards, "text.jsonl", "dataset.json"]:
        assert (one / name).read_bytes() == (several / name).read_bytes()
