"""From a run folder or a checkpoint file back to the policy, without making the env.

path → checkpoint file → settings, spaces → a new policy → its weights. Runs no code that the file names unless the user allows
it. Knows nothing of training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hurtle.algorithms.algorithm import algorithm_names, find_algorithm
from hurtle.emulation.action_layout import ActionLayout
from hurtle.emulation.flat_layout import SpaceLayout
from hurtle.errors import CheckpointError, HurtleError
from hurtle.policies.build import build_policy
from hurtle.policies.policy import Policy
from hurtle.policies.policy_config import PolicyConfig, config_from_saved
from hurtle.policies.saved_spaces import layout_from_dict, space_from_dict
from hurtle.policies.torch_device import find_device
from hurtle.references import load_reference
from hurtle.tracking.checkpoints import Checkpoints, load_checkpoint
from hurtle.tracking.run_folder import RunFolder
from hurtle.trust import SIGNATURE, check_code, is_signed

BEST = "best.pt"


@dataclass(frozen=True)
class Restored:
    """A policy from a checkpoint, and what the checkpoint says about it.

    Attributes:
        policy: On its device, in eval mode.
        settings: The settings of the run, flat and as TOML has them; those of its algorithm are not interpreted.
        layout: How the env's structured observation lies in the flat one; None if the env was not emulated.
        action_layout: How the env's structured action lies in the flat one; None if the env was not emulated.
        steps: Steps trained.
        has_named_env: Whether the env can be made from the settings; otherwise the caller must pass it.
        has_masks: Whether the env masks actions.
        file: The checkpoint.
        trusted: Whether code that the checkpoint names may run: the user allowed it, or signed the run.
        signature: The signature in the checkpoint, if any.
    """

    policy: Policy
    settings: dict[str, Any]
    layout: SpaceLayout | None
    action_layout: ActionLayout | None
    steps: int
    has_named_env: bool
    has_masks: bool
    file: Path
    trusted: bool
    signature: Any = None

    def named_env(self) -> str:
        """The name of the run's env.

        Raises:
            HurtleError: The run was given an object, which a checkpoint cannot hold.
        """
        if not self.has_named_env:
            raise HurtleError(f"The run was trained on {self.settings['env']}, an object without a name: pass it as env=….")
        return self.settings["env"]

    @property
    def emulated(self) -> bool:
        """Whether the env must be emulated for this policy."""
        return self.layout is not None or self.action_layout is not None


def find_checkpoint(path: Any) -> tuple[Path | None, Path]:
    """The run folder, if there is one, and the checkpoint file that `path` stands for.

    Args:
        path: A run folder, "latest", a `Run`, or a checkpoint file. A run's best checkpoint is taken if there is one, else its
            newest.
    """
    path = Path(getattr(path, "path", path))
    if path.is_file():
        folder = path.parent.parent
        return (folder if (folder / "config.toml").is_file() else None), path
    run = RunFolder.open(path)
    best = run.checkpoints / BEST
    found = best if best.is_file() else Checkpoints(run.checkpoints).latest()
    if found is None:
        raise CheckpointError(f"The run {run.path} has no complete checkpoint yet.")
    return run.path, found


def restore(
    file: Path, module: nn.Module | type[nn.Module] | str | None = None, device: str = "cpu", trust: bool = False
) -> Restored:
    """Build the policy of a checkpoint and load its weights.

    Args:
        file: The checkpoint.
        module: The user's own module, its class, or the class as "my_policy.py:MyPolicy"; None: what the checkpoint names.
        device: Where the policy goes.
        trust: Run code that the checkpoint names, even if this user did not sign it.

    Raises:
        CheckpointError: The file is not a checkpoint, or is damaged.
        TrustError: It names code that the user has not allowed.
        HurtleError: It needs a module that was not given.
    """
    state = load_checkpoint(file)
    if module is None and not state["named_policy"]:
        raise HurtleError(
            f"{file} holds a module of your own: pass one that is built alike, hurtle.load(path, policy=MyPolicy(…))."
        )
    settings = dict(state["settings"])
    trusted, signature = is_trusted(state, trust), settings.pop(SIGNATURE, None)
    config = config_from_saved(PolicyConfig, settings)
    if module is None:
        check_code(file, {"policy": config.policy}, trusted, signature)
    spaces = state["spaces"]
    layout, action_layout = _layouts(spaces["structure"])
    policy = build_policy(
        config,
        space_from_dict(spaces["observation"]),
        space_from_dict(spaces["action"]),
        layout=layout,
        normalize_observations=settings.get("normalize_observations", False),
        observation_clip=settings.get("observation_clip", 10.0),
        module=load_reference(module) if isinstance(module, str) else module,
        make_network=_network_maker(settings),
    )
    load_weights(policy, state["policy"], file)
    policy.to(find_device(device)).eval()
    steps, has_masks = state["progress"]["steps"], spaces.get("masked", False)
    return Restored(policy, settings, layout, action_layout, steps, state["named_env"], has_masks, file, trusted, signature)


def _network_maker(settings: dict[str, Any]) -> Callable[..., Any] | None:
    """What makes the network of a built-in algorithm; a user's own acts with an actor–critic, and its code is not needed."""
    name = settings["algorithm"]
    if name not in algorithm_names():
        return None
    algorithm = find_algorithm(name)
    return algorithm.network_maker(config_from_saved(algorithm.config, settings))


def is_trusted(state: dict[str, Any], trust: bool = False) -> bool:
    """Whether code that a checkpoint names may run: the user allows it, or signed the checkpoint."""
    return trust or is_signed(state["settings"], state["settings"].get(SIGNATURE))


def _layouts(structure: dict[str, Any] | None) -> tuple[SpaceLayout | None, ActionLayout | None]:
    """How the env's own spaces lie in the flat ones; (None, None) if the env was not emulated."""
    if structure is None:
        return None, None
    return layout_from_dict(structure["observation"]), ActionLayout(space_from_dict(structure["action"]))


def load_weights(policy: Policy, weights: dict[str, Any], file: Path) -> None:
    """Load the weights of a checkpoint into a policy that is built like the saved one.

    Raises:
        CheckpointError: Names the weights that do not fit.
    """
    own = policy.state_dict()
    problems = [f"{name} is missing" for name in own.keys() - weights.keys()]
    problems += [f"{name} is not in this policy" for name in weights.keys() - own.keys()]
    problems += [
        f"{name} is {list(weights[name].shape)}, expected {list(own[name].shape)}"
        for name in own.keys() & weights.keys()
        if weights[name].shape != own[name].shape
    ]
    if problems:
        shown = "; ".join(sorted(problems)[:5]) + (" …" if len(problems) > 5 else "")
        raise CheckpointError(f"The policy in {file} is built differently: {shown}. Use the same module, spaces and sizes.")
    policy.load_state_dict(weights)
