"""A picture of what a command prints in colours, as SVG: the one in the README is made by

    specjax demo | python docs/picture.py "specjax demo" >docs/plots/demo.svg

It draws what was printed, line by line, and nothing else.
"""

from __future__ import annotations

import html
import re
import sys

COLOURS = {"32": "#2da44e", "36": "#0f9aa8", "34": "#4f8ff7", "35": "#bf5af2"}
"""Green, cyan, blue and magenta, readable on the dark ground of the picture."""

_GROUND, _TEXT, _MARK = "#1b1f27", "#d7dce5", "#8b93a3"
_WIDTH, _HEIGHT, _MARGIN = 7.8, 17, 16
"""Of a character, of a line, and around the text, in pixels."""


def picture(command: str, printed: str) -> str:
    """The SVG of a command and of what it printed.

    Args:
      command: shown above the text, after a prompt.
      printed: text with the escapes of `COLOURS`, each until the next escape.
    """
    lines = [line.expandtabs() for line in printed.rstrip("\n").split("\n")]
    plain = [re.sub(r"\033\[\d*m", "", line) for line in lines]
    columns = max(len(line) for line in [*plain, f"$ {command}"])
    width = round(columns * _WIDTH + 2 * _MARGIN)
    height = (len(lines) + 2) * _HEIGHT + 2 * _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="ui-monospace, SFMono-Regular, Menlo, '
        f'Consolas, DejaVu Sans Mono, monospace" font-size="13" fill="{_TEXT}">',
        f"<title>{html.escape(command)}</title>",
        f'<rect width="{width}" height="{height}" rx="6" fill="{_GROUND}"/>',
        _line(0, f'<tspan fill="{_MARK}">$</tspan> {html.escape(command)}', len(command) + 2),
    ]
    for number, line in enumerate(lines, 2):
        if plain[number - 2].strip():
            parts.append(_line(number, _spans(line), len(plain[number - 2])))
    return "\n".join([*parts, "</svg>", ""])


def _line(number: int, content: str, columns: int) -> str:
    """A line of text, as wide as its columns whatever the font is."""
    y = _MARGIN + (number + 0.75) * _HEIGHT
    return (
        f'<text x="{_MARGIN}" y="{y:g}" xml:space="preserve" '
        f'textLength="{columns * _WIDTH:g}">{content}</text>'
    )


def _spans(line: str) -> str:
    """The text of a line, with what is coloured in spans."""
    parts, colour = [], None
    for piece in re.split(r"(\033\[\d*m)", line):
        if escape := re.fullmatch(r"\033\[(\d*)m", piece):
            colour = COLOURS.get(escape[1])
        elif piece:
            text = html.escape(piece)
            parts.append(f'<tspan fill="{colour}">{text}</tspan>' if colour else text)
    return "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(picture(sys.argv[1], sys.stdin.read()))
