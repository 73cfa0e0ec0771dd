"""Hurtle: reinforcement learning in Python at the speed of the hardware.

The public names are loaded when first used; `import hurtle` itself imports neither torch nor any extra.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hurtle.garbage import RARE_COLLECTIONS

if TYPE_CHECKING:
    from hurtle.deploy.exporting import export
    from hurtle.deploy.loading import load
    from hurtle.emulation.wrap import emulate
    from hurtle.envs.registry import make, register
    from hurtle.errors import HurtleError
    from hurtle.experiments.comparison import compare
    from hurtle.experiments.populations.population import train_population
    from hurtle.experiments.seeds import train_seeds
    from hurtle.experiments.sweeps.sweep import sweep
    from hurtle.runners.training import train
    from hurtle.vector.factory import make_vec

__version__ = "0.1.0"
__all__ = [
    "HurtleError",
    "__version__",
    "compare",
    "emulate",
    "export",
    "load",
    "make",
    "make_vec",
    "mujoco",
    "native",
    "register",
    "sweep",
    "train",
    "train_population",
    "train_seeds",
]

_HOMES = {
    "HurtleError": "hurtle.errors",
    "compare": "hurtle.experiments.comparison",
    "emulate": "hurtle.emulation.wrap",
    "export": "hurtle.deploy.exporting",
    "load": "hurtle.deploy.loading",
    "make": "hurtle.envs.registry",
    "make_vec": "hurtle.vector.factory",
    "register": "hurtle.envs.registry",
    "sweep": "hurtle.experiments.sweeps.sweep",
    "train": "hurtle.runners.training",
    "train_population": "hurtle.experiments.populations.population",
    "train_seeds": "hurtle.experiments.seeds",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        with RARE_COLLECTIONS:
            value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name in ("mujoco", "native"):
        return import_module(f"hurtle.{name}")
    raise AttributeError(f"module 'hurtle' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
