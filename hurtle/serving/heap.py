"""The garbage collector of a server process: what was loaded stays out of collections, which would hold up requests."""

from __future__ import annotations

import gc

_frozen = False


def freeze() -> None:
    """Keep all objects of this process out of collections; a server that has the process to itself calls it once started."""
    global _frozen
    _frozen = True
    gc.collect()
    gc.freeze()


def release() -> None:
    """Free what was frozen and is no longer used; does nothing in a process that `freeze` was not called in."""
    if _frozen:
        gc.unfreeze()
        freeze()
