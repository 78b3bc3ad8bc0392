"""Print the shell commands in the ```bash blocks of Markdown files, in order, each once.

An argument is a file, or a folder with all files below it.
"""

import pathlib
import re
import sys

files = [
    file
    for path in map(pathlib.Path, sys.argv[1:])
    for file in (sorted(path.rglob("*.md")) if path.is_dir() else [path])
]
blocks = [
    block
    for file in files
    for block in re.findall(r"^```bash\n(.*?)^```", file.read_text(), re.DOTALL | re.MULTILINE)
]
print("\n".join(dict.fromkeys(blocks)))
