"""`Understudy`: a process that prepares games of Atari while envs play others: starting a game takes as long as 20 steps.

an emulator's state → reset, no-ops, in another process → its state at the start of the next game. Workers of a vector, whose
envs step together, would else wait for every game that begins anew.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from hurtle.errors import HurtleError

NICENESS = 10  # it works in the gaps in which a core has nothing else to do
DEPENDENT = {
    *("amidar", "crossbow", "double_dunk", "hangman", "haunted_house", "ice_hockey", "koolaid", "kung_fu_master", "pooyan"),
    *("qbert", "sir_lancelot", "space_war", "surround", "tetris", "time_pilot", "trondead", "yars_revenge"),
}
"""Games whose first screens depend on how the last game was played, not on the emulator's random numbers alone."""


class Game(NamedTuple):
    """What an emulator has loaded."""

    rom: str
    mode: int | None
    difficulty: int | None


class Understudy:
    """A process that prepares games for all envs of this process; it is forked for the first order.

    It works on copies of the envs' emulators, which it inherits.
    """

    def __init__(self) -> None:
        self._emulators: dict[Game, Any] = {}
        self._envs = 0
        self._process = 0
        self._orders = 0
        self._ready: dict[int, bytes | None] = {}  # by number of the order; None: dropped

    def join(self, game: Game, emulator: Any) -> None:
        """Add an env; `leave` removes it."""
        self._emulators.setdefault(game, emulator)
        self._envs += 1

    def leave(self) -> None:
        """Remove an env; the process ends with the last one."""
        self._envs -= 1
        if self._envs == 0:
            self._emulators.clear()
            self._ready.clear()
            if self._process:
                self._connection.close()
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(self._process, 0)
                self._process = 0

    def order(self, game: Game, before: bytes, noops: int) -> int:
        """Order the next game.

        Args:
            game: The game.
            before: The emulator's state, with its random numbers, at any time since the last game began.
            noops: Frames of doing nothing with which the game begins.

        Returns:
            The number of the order.
        """
        if not self._process:
            self._fork()
        self._orders += 1
        with self._explained():
            self._connection.send((self._orders, game, before, noops))
        return self._orders

    def drop(self, number: int) -> None:
        """Do without the game of an order."""
        if self._ready.pop(number, None) is None:
            self._ready[number] = None

    def start(self, number: int) -> bytes:
        """Wait for the game of an order: the emulator's state, with its random numbers."""
        while (found := self._ready.get(number)) is None:
            with self._explained():
                done, state = self._connection.recv()
            if done in self._ready:
                del self._ready[done]
            else:
                self._ready[done] = state
        del self._ready[number]
        return found

    def _fork(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._process = os.fork()
        if not self._process:
            _serve(theirs, self._emulators)
        theirs.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            raise HurtleError(f"The process that prepares Atari games (pid {self._process}) has ended.") from error


def _serve(connection: Connection, emulators: dict[Game, Any]) -> None:
    """Serve until the other end closes, then end the process without a trace of what it inherited."""
    try:
        inherited = [
            int(entry.name) for entry in Path("/dev/fd").iterdir()
        ]  # pipes of the worker, which must close when it ends
        for fd in inherited:
            if fd > 2 and fd != connection.fileno():
                with contextlib.suppress(OSError):
                    os.close(fd)
        os.nice(NICENESS)
        while True:
            number, game, before, noops = connection.recv()
            connection.send((number, prepared(emulators[game], before, noops)))
    except (EOFError, OSError):  # the envs are gone
        pass
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def prepared(emulator: Any, before: bytes, noops: int) -> bytes:
    """The emulator's state at the start of the next game."""
    restore(emulator, before)
    emulator.reset_game()
    do_nothing(emulator, noops)
    return emulator.cloneState(include_rng=True).serialize()


def restore(emulator: Any, state: bytes) -> None:
    """Put the emulator into this state."""
    from ale_py import ALEState

    emulator.restoreState(ALEState(state))


def do_nothing(emulator: Any, frames: int) -> None:
    """No-ops at the start of a game; if they end it, the next one starts."""
    for _ in range(frames):
        emulator.act(0)
        if emulator.game_over():
            emulator.reset_game()


UNDERSTUDY = Understudy()
"""That of this process."""
