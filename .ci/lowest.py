"""Print the lowest versions that pyproject.toml admits, and what the tests themselves import."""

import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
needed = project["dependencies"] + [
    need for name in ("hub", "plot", "chat", "train") for need in extras[name]
]
tools = [need for need in extras["dev"] if need.startswith(("chex", "pytest", "scipy"))]
print("\n".join(need.partition(";")[0].replace(">=", "==") for need in needed + tools))
