"""Cases of folders of Medusa heads."""

from __future__ import annotations

import json
import pathlib
import random

import numpy as np

import specjax
from tests.fuzz import bases, values
from tests.fuzz.damaged import Damaged
from tests.fuzz.folders import changed_weights
from tests.fuzz.law import Case

_WEIGHTS = "medusa_lm_head.safetensors"


class Drafters:
    """Medusa folders with another configuration, tree or weights."""

    def __init__(self, root: pathlib.Path) -> None:
        self.target, self.homes = bases.model("llama"), []
        (root / "outside").mkdir()
        for version, own in enumerate((False, True)):
            heads = specjax.MedusaAdapter.create(self.target, 2, own_heads=own)
            folder = root / f"medusa-{version}"
            specjax.save_medusa(folder, heads, "t")
            config = json.loads((folder / "config.json").read_text())
            config["specjax"] |= {"choices": [[0], [1], [0, 0]], "acceptance": [0.5, 0.2, 0.4]}
            (folder / "config.json").write_text(json.dumps(config))
            self.homes.append(Damaged(folder, root / "outside"))

    def case(self, rng: random.Random) -> Case:
        home, refused = rng.choice(self.homes), False
        home.reset()
        act = rng.random()
        if act < 0.65:
            config = json.loads(home.files["config.json"])
            config = values.changed(rng, config, rng.choice((1, 1, 2)))
            home.put("config.json", values.text_of(rng, config))
        elif act < 0.95:
            home.put(_WEIGHTS, changed_weights(rng, home.files[_WEIGHTS]))
        else:
            refused = home.strange(rng, rng.choice(("config.json", _WEIGHTS)))

        def check(adapter: object) -> None:
            assert isinstance(adapter, specjax.MedusaAdapter)
            assert all(np.isfinite(leaf).all() for leaf in adapter.params.values()), "not finite"
            adapter.check(self.target)

        def act_on() -> specjax.MedusaAdapter:
            return specjax.load_medusa(home.folder, self.target)

        return Case(act_on, (str(home.folder),), check, refused)
