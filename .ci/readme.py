"""Print the shell commands in the ```bash blocks of Markdown files, in order, each once."""

import re
import sys

pages = [open(page).read() for page in sys.argv[1:]]
blocks = [
    b for text in pages for b in re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
]
print("\n".join(dict.fromkeys(blocks)))
