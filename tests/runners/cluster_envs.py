"""Envs that fail once, for collectors on a cluster. A light module: their processes import nothing else of the tests."""

import os
import signal
import time
from pathlib import Path

from slow_envs import Simulator


class FailsOnce(Simulator):
    """In one step of its life it hangs, or kills its process, unless that has happened before, to whichever env.

    Args:
        folder: Where it leaves a note that it has happened.
        fails_by: "hang" or "kill".
        at: The step.
        seconds: A step takes this long.
    """

    def __init__(self, folder, fails_by, at=40, seconds=0.0):
        super().__init__(seconds)
        self.note, self.how, self.at = Path(folder) / "failed", fails_by, at

    def step(self, action):
        if self.age == self.at and self._is_first():
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)
        return super().step(action)

    def _is_first(self):
        try:
            self.note.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
