"""The configurations that families publish, by the name of the model."""

import json
import pathlib

PUBLISHED = json.loads(
    (pathlib.Path(__file__).parent / "fixtures" / "published_configs.json").read_text()
)
