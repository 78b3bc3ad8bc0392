"""Pictures of trees and benchmarks: the tests count what is drawn."""

import builtins

import pytest

from specjax import plot

PARENT = [-1, 0, 0, 1, 1, -1, 5]


def test_every_edge_and_node_is_drawn(tmp_path):
    """Nodes, edges with their acceptance as number and width, and the marked path are drawn; absent
    nodes are not."""
    figure = plot.tree(
        PARENT, [1, 0.5, 0.25, 1.0, float("nan"), 0.9, 0.9], list("rabcdef"), path=[0, 1]
    )
    (axes,) = figure.axes
    assert len(axes.lines) == 4
    assert len(axes.texts) == 5 + 3  # five labels, three numbers
    assert {text.get_text() for text in axes.texts} == {*"rabcd", "0.50", "0.25", "1.00"}
    widths = [line.get_linewidth() for line in axes.lines]
    assert widths[2] > widths[0] > widths[1]
    assert [line.get_color() for line in axes.lines] == ["C1", "C0", "C0", "C0"]
    assert [line.get_linestyle() for line in axes.lines] == ["-", "-", "-", ":"]
    # A parent is between its children, and a level is a column.
    assert [tuple(line.get_xdata()) for line in axes.lines] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    heights = [line.get_ydata()[1] for line in axes.lines]
    assert heights[0] == (heights[2] + heights[3]) / 2
    figure.savefig(tmp_path / "tree.png")
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")


def test_a_root_alone_is_a_picture():
    """By default the labels are the indices of the nodes."""
    (axes,) = plot.tree([-1]).axes
    assert ([text.get_text() for text in axes.texts], list(axes.lines)) == (["0"], [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([-1, 0], [0.5]), r"acceptance 1 and labels 2 entries"),
        (([-1, 0], None, ["x"]), r"labels 1 entries"),
        (([-1, 1],), "after its parent"),
        (([-1, 0], [1.0, 1.5]), r"lie in \[0, 1\]"),
    ],
)
def test_bad_trees_are_refused(arguments, message):
    """The arguments are checked before matplotlib is imported."""
    with pytest.raises(ValueError, match=message):
        plot.tree(*arguments)


def row(rule, temperature, drafts=4, **figures):
    """A row of a report of `specjax bench`."""
    known = {"alpha": [0.5, 0.4, 0.6], "tau": [2.0, 1.9, 2.1], "speedup": None, **figures}
    exact = rule != "typical"
    return {"proposer": "draft", "num_drafts": drafts, "drafted": drafts, "rule": rule,
            "exact": exact, "temperature": temperature, **known}  # fmt: skip


def test_every_row_of_a_bench_is_a_bar():
    """Each measured figure has a panel, and each row has a bar, except plain decoding; inexact
    rules are hatched and named."""
    rows = [
        one
        for t in (0.0, 1.0)
        for one in (
            row("match", t, 0, alpha=None),
            row("match", t),
            row("match", t, 6),
            row("typical", t),
        )
    ]
    figure = plot.bench({"rows": rows})
    assert len(figure.axes) == 4  # alpha and tau, greedy and at temperature 1; nothing was timed
    for axes, value in zip(figure.axes, [0.5, 0.5, 2.0, 2.0], strict=True):
        assert [bar.get_height() for bar in axes.patches] == [value] * 3
        assert [bool(bar.get_hatch()) for bar in axes.patches] == [False, False, True]
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == [
        "match",
        "typical (exact=False)",
    ]
    assert [text.get_text() for text in figure.axes[2].get_xticklabels()] == ["draft 4", "draft 6"]
    assert len(plot.bench({"rows": [row("match", 0.0, speedup=1.5)]}).axes) == 3


def test_without_matplotlib(monkeypatch):
    """The error says what to install."""
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install -e .*\[plot\]"):
        plot.tree([-1, 0])
