"""A tree as a picture: what is drawn is counted."""

import builtins

import pytest

from specjax import plot

PARENT = [-1, 0, 0, 1, 1, -1, 5]


def test_every_edge_and_node_is_drawn(tmp_path):
    """Nodes that are there, edges with acceptance as number and thickness, and the marked path; not what is absent."""
    figure = plot.tree(PARENT, [1, 0.5, 0.25, 1.0, float("nan"), 0.9, 0.9], list("rabcdef"), path=[0, 1])
    (axes,) = figure.axes
    assert len(axes.lines) == 4
    assert len(axes.texts) == 5 + 3  # five labels, three numbers
    assert {text.get_text() for text in axes.texts} == {*"rabcd", "0.50", "0.25", "1.00"}
    widths = [line.get_linewidth() for line in axes.lines]
    assert widths[2] > widths[0] > widths[1]
    assert [line.get_color() for line in axes.lines] == ["C1", "C0", "C0", "C0"]
    assert [line.get_linestyle() for line in axes.lines] == ["-", "-", "-", ":"]
    # A parent stands between its children, and a level is a column.
    assert [tuple(line.get_xdata()) for line in axes.lines] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    heights = [line.get_ydata()[1] for line in axes.lines]
    assert heights[0] == (heights[2] + heights[3]) / 2
    figure.savefig(tmp_path / "tree.png")
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")


def test_a_root_alone_is_a_picture():
    """Numbers are the labels where none are given."""
    (axes,) = plot.tree([-1]).axes
    assert ([text.get_text() for text in axes.texts], list(axes.lines)) == (["0"], [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([-1, 0], [0.5]), r"acceptance 1 and labels 2 entries"),
        (([-1, 0], None, ["x"]), r"labels 1 entries"),
        (([-1, 1],), "behind its parent"),
        (([-1, 0], [1.0, 1.5]), r"lie in \[0, 1\]"),
    ],
)
def test_what_is_no_tree_is_refused(arguments, message):
    """Before matplotlib is asked for."""
    with pytest.raises(ValueError, match=message):
        plot.tree(*arguments)


def test_without_matplotlib(monkeypatch):
    """The error says what to install."""
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'specjax\[plot\]'"):
        plot.tree([-1, 0])
