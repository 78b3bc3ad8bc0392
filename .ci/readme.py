"""Print the shell commands of a Markdown file: what stands in its ```bash blocks, in order."""

import re
import sys

print("\n".join(re.findall(r"^```bash\n(.*?)^```", open(sys.argv[1]).read(), re.DOTALL | re.MULTILINE)))
