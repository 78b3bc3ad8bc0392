"""`specjax quantise FOLDER OUT` writes a folder with its matrices in 4 or 8 bits."""

from __future__ import annotations

import dataclasses
import json
import pathlib

from specjax.files import SINGLE, find_folder, load
from specjax.methods import text_files
from specjax.options.command import parse
from specjax.options.fields import REQUIRED, Options, count, option
from specjax.rounding import METHODS, distance, pieces_of, quantise_folder


@dataclasses.dataclass(frozen=True)
class QuantiseOptions(Options):
    """The options of `specjax quantise`."""

    group = "rounding"

    folder: str = option(REQUIRED, "folder of the model, or org/name on the Hub", positional=True)
    out: str = option(REQUIRED, "folder to write, which must not exist yet", positional=True)
    method: str = option(
        "nearest", "nearest needs no text; gptq keeps the outputs on --data", choices=METHODS
    )
    bits: str = option("4", "of a number of a matrix", choices=("4", "8"))
    group_size: int | None = count(
        None,
        "inputs that share a scale; default: in 4 bits 128, 64 or 32, the first that divides the "
        "inputs of a matrix, and in 8 bits all inputs of an output",
    )
    data: tuple[str, ...] = option(
        (), "files or folders of UTF-8 text that gptq reads, such as what the model is used for"
    )
    samples: int = count(128, "the most pieces that are cut of --data")
    length: int = count(512, "tokens of a piece")
    compare: tuple[str, ...] = option(
        (), "files or folders of text on which both models are compared at the end"
    )
    json: bool = option(False, "print one JSON object and nothing else")


def main(prog: str, argv: list[str]) -> None:
    """Write a folder with its matrices in 4 or 8 bits, which vLLM reads too."""
    o = parse(QuantiseOptions, argv, main.__doc__, prog)
    if o.method == "gptq" and not o.data:
        raise ValueError("--method gptq needs text to calibrate with: pass --data FILE")
    if o.method != "gptq" and o.data:
        raise ValueError(f"--method {o.method} reads no text: leave --data out, or pass gptq")
    texts, judged = _read(o.data), _read(o.compare)
    made = quantise_folder(
        o.folder, o.out, o.method, bits=int(o.bits), group=o.group_size,
        texts=texts or None, samples=o.samples, length=o.length,
    )  # fmt: skip
    source = find_folder(o.folder)
    facts: dict[str, object] = {
        "method": o.method,
        "bits": int(o.bits),
        "bytes_before": sum(file.stat().st_size for file in source.glob("*.safetensors")),
        "bytes": (pathlib.Path(o.out) / SINGLE).stat().st_size,
    }
    if judged:
        plain = load(source)
        pieces = pieces_of("--compare", judged, plain, 2**20, o.length)
        facts |= distance(plain, load(o.out), pieces)._asdict()
    if o.json:
        print(json.dumps(facts))
        return
    print(f"  {made.name}: {facts['bytes']:,} bytes instead of {facts['bytes_before']:,}")
    if judged:
        print(
            f"  {facts['tokens']:,} tokens: perplexity {facts['rounded']:.4f} instead of "
            f"{facts['plain']:.4f}, KL {facts['divergence']:.5f} nats a token, "
            f"{facts['agreement']:.1%} of the best tokens the same"
        )


def _read(paths: tuple[str, ...]) -> list[str]:
    files = text_files([*map(pathlib.Path, paths)]) if paths else []
    return [path.read_text(encoding="utf-8", errors="replace") for path in files]
