"""What the authors of specjax count."""

from experiments import house, mappings


def test_the_house_is_counted(capsys, monkeypatch):
    """Each figure is a line; a call that is followed runs through the files that it needs."""
    house.main(["--calls"])
    text = capsys.readouterr().out
    assert "lines without training, options and cli" in text
    for file in ("specjax/decoding/decoder.py", "specjax/rules/match.py"):
        assert f"  {file}\n" in text


def test_a_call_that_climbs_is_found():
    """The lowest floor calls what it was given; a room above it does not call a higher one."""
    from specjax import drafters, generation
    from specjax._internal import checks

    def up(into):
        return eval(compile("lambda: f()", drafters.__file__, "eval"), {"f": into})()

    above = eval(compile("lambda: 1", generation.__file__, "eval"))
    entered, climbs = house.follow(lambda: up(above))
    assert [path.name for path in entered] == ["__init__.py", "__init__.py"]
    assert dict(climbs) == {("drafters/__init__.py", "generation/__init__.py"): 1}
    low = eval(compile("lambda: f()", checks.__file__, "eval"), {"f": above})
    assert not house.follow(low)[1]
    assert not house.follow(lambda: above())[1]


def test_programs_take_mappings(capsys):
    """The share that a process has grows with each program that it holds."""
    mappings.main(["--programs", "3", "--kernels", "9"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["1 programs", "2 programs", "3 programs"]
    shares = [float(line.split()[2].rstrip("%")) for line in lines]
    assert 0 < shares[0] <= shares[1] <= shares[2] < 100
