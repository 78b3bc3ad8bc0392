"""A folder whose files a case damages, and which is whole again for the next case."""

from __future__ import annotations

import os
import pathlib
import random
import shutil


class Damaged:
    """The files of a folder, with what was changed."""

    def __init__(self, folder: pathlib.Path, outside: pathlib.Path) -> None:
        self.folder, self.outside = folder, outside
        self.files = {file.name: file.read_bytes() for file in folder.iterdir()}
        self._changed: set[str] = set()

    def reset(self) -> None:
        """Undo the changes of the last case."""
        for name in self._changed:
            self._remove(name)
            if name in self.files:
                (self.folder / name).write_bytes(self.files[name])
        self._changed = set()

    def put(self, name: str, content: bytes) -> None:
        self._remove(name)
        (self.folder / name).write_bytes(content)

    def drop(self, name: str) -> None:
        self._remove(name)

    def link(self, name: str, target: str | os.PathLike[str]) -> None:
        self._remove(name)
        (self.folder / name).symlink_to(target)

    def strange(self, rng: random.Random, name: str) -> bool:
        """Replace a file by what is no plain file.  Returns whether loading must be refused."""
        self._remove(name)
        path = self.folder / name
        kind = rng.choice(
            ("pipe", "device", "folder", "sparse", "loop", "gone", "outside", "inside")
        )
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to(rng.choice(("/dev/zero", "/dev/stdin", "/proc/self/mem")))
        elif kind == "folder":
            path.mkdir()
        elif kind == "sparse":
            with open(path, "wb") as stream:
                stream.write(self.files.get(name, b"{}"))
                stream.truncate(100 * 2**30)
        elif kind == "loop":
            path.symlink_to(path)
        elif kind == "outside":
            (self.outside / name).write_bytes(self.files.get(name, b"{}"))
            path.symlink_to(rng.choice((self.outside / name, f"../{self.outside.name}/{name}")))
        elif kind == "inside":
            self.put(f"own-{name}", self.files.get(name, b"{}"))
            path.symlink_to(f"own-{name}")
        return kind not in ("gone", "inside")

    def _remove(self, name: str) -> None:
        self._changed.add(name)
        path = self.folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
