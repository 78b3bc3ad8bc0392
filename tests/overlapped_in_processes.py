"""Run as one of two processes with two devices each, for `tests/test_overlap.py`:

python tests/overlapped_in_processes.py HOST:PORT ID

The draft has the devices of the first process, and the target those of the second.  It compares
texts with those of one device, and then decodes until it is killed.
"""

import sys

from specjax.parallel.processes import join, leaving

if __name__ == "__main__":
    join(sys.argv[1], 2, int(sys.argv[2]))

import jax
import toys

from specjax.parallel import Overlapped, make_mesh


def main():
    devices = jax.devices()
    assert len(devices) == 4 and len(jax.local_devices()) == 2
    meshes = make_mesh(devices=devices[:2]), make_mesh(2, devices=devices[2:])
    for case, rule in (("draft 3", "match"), ("draft tree", "rejection")):
        made = Overlapped(toys.decoder(case, rule), *meshes, measures=False)
        params = made.place(toys.params(case))
        state = made.run(params, toys.prefill(made, params, temperature=1.0))
        texts, sequential = toys.decoded(case, rule, 1.0)
        assert toys.texts(state) == texts
        assert state.stats.accepted.tolist() == sequential.stats.accepted.tolist()
        foresight = made.foresight(state)
        assert 0 < foresight.hits.sum() < foresight.asked.sum()
        assert (state.target is None) != (state.draft is None), "each process has its own half"
    print("going on", file=sys.stderr, flush=True)
    while True:
        made.run(params, toys.prefill(made, params, temperature=1.0))


if __name__ == "__main__":
    with leaving():
        main()
