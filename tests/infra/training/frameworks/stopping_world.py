"""Processes of which one is told to leave: each prints the step after which it stops.

python -m tests.infra.training.frameworks.stopping_world WORLD RANK STEP
"""

import os
import signal
import sys

from tests.infra.training.worlds import fork_world

STEPS = 40


def main() -> None:
    world, told, at = map(int, sys.argv[1:])

    def rank(own: int) -> None:
        from ebbflow.infra.training.frameworks.stopping import StopAgreement

        agreement = StopAgreement(0, {"RANK": str(own)})
        assert agreement.is_first == (own == 0)
        stopped = 0
        for step in range(1, STEPS + 1):
            if own == told and step == at:
                os.kill(os.getpid(), signal.SIGTERM)
            if agreement.after_step(step):
                stopped = step
                break
        agreement.barrier()
        agreement.close()
        os.write(1, f"{stopped}\n".encode())  # at once: the others write, too

    fork_world(rank, world)


if __name__ == "__main__":
    main()
