"""From a run folder or a checkpoint file back to the policy, without making the env or running code that nobody allowed.

path → checkpoint file → settings, spaces → the policy built anew → its weights. Knows nothing of training.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hurtle.emulation.actions import ActionLayout
from hurtle.emulation.layout import SpaceLayout
from hurtle.errors import CheckpointError, HurtleError
from hurtle.policies.build import build_policy
from hurtle.policies.policy import Policy
from hurtle.policies.spaces import layout_from_dict, space_from_dict
from hurtle.references import load_reference
from hurtle.runners.config import Settings, settings_from_dict, settings_to_dict
from hurtle.runners.devices import find_device
from hurtle.tracking.checkpoints import Checkpoints, load_checkpoint
from hurtle.tracking.run_folder import RunFolder
from hurtle.trust import SIGNATURE, check_code, is_signed

BEST = "best.pt"


@dataclass(frozen=True)
class Restored:
    """A policy as a checkpoint has it.

    Attributes:
        policy: On its device, in eval mode.
        settings: Of the run.
        layout: How the env's structured observation becomes the flat one; None where the env was not emulated.
        action_layout: How a flat action becomes the env's structured one; None likewise.
        steps: How long it was trained.
        has_named_env: Whether the env can be made from the settings; else the caller must have it.
        has_masks: Whether the env told which actions are legal.
        file: The checkpoint.
        trusted: Whether code that it names may run: the user said so, or signed it.
        signature: The one that it carries, if any.
    """

    policy: Policy
    settings: Settings
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
            HurtleError: The run was given an object, which no checkpoint holds.
        """
        if not self.has_named_env:
            raise HurtleError(f"The run was trained on {self.settings.train.env}, an object without a name: pass it as env=….")
        return self.settings.train.env

    @property
    def emulated(self) -> bool:
        """Whether its env must be emulated for it."""
        return self.layout is not None or self.action_layout is not None


def find_checkpoint(path: Any) -> tuple[Path | None, Path]:
    """The run folder, if there is one, and the checkpoint file that `path` means.

    Args:
        path: A run folder, "latest", a `Run`, or a checkpoint file. Of a run: its best one if it has that, else the newest.
    """
    path = Path(getattr(path, "path", path))
    if path.is_file():
        folder = path.parent.parent
        return (folder if (folder / "config.toml").is_file() else None), path
    run = RunFolder.open(path)
    best = run.checkpoints / BEST
    found = best if best.is_file() else Checkpoints(run.checkpoints).latest()
    if found is None:
        raise CheckpointError(f"The run {run.path} has no checkpoint yet that is whole.")
    return run.path, found


def restore(
    file: Path, module: nn.Module | type[nn.Module] | str | None = None, device: str = "cpu", trust: bool = False
) -> Restored:
    """Build the policy of a checkpoint and load its weights.

    Args:
        file: The checkpoint.
        module: The user's own module, its class, or the class as "my_policy.py:MyPolicy"; None: what the checkpoint names.
        device: Where the policy goes.
        trust: Run code that the checkpoint names, also if this user did not sign it.

    Raises:
        CheckpointError: The file is none, or is damaged.
        TrustError: It names code that the user has not allowed.
        HurtleError: It needs a module that was not given.
    """
    state = load_checkpoint(file)
    if module is None and not state["named_policy"]:
        raise HurtleError(
            f"{file} holds a module of your own: pass one that is built alike, hurtle.load(path, policy=MyPolicy(…))."
        )
    settings, trusted = saved_settings(state, trust)
    signature = state["settings"].get(SIGNATURE)
    if module is None:
        check_code(file, {"policy": settings.policy.policy}, trusted, signature)
    spaces = state["spaces"]
    layout, action_layout = _layouts(spaces["structure"])
    policy = build_policy(
        settings.policy,
        space_from_dict(spaces["observation"]),
        space_from_dict(spaces["action"]),
        layout=layout,
        normalize_observations=settings.train.normalize_observations,
        observation_clip=settings.train.observation_clip,
        module=load_reference(module) if isinstance(module, str) else module,
    )
    load_weights(policy, state["policy"], file)
    policy.to(find_device(device)).eval()
    steps, has_masks = state["progress"]["steps"], spaces.get("masked", False)
    return Restored(policy, settings, layout, action_layout, steps, state["named_env"], has_masks, file, trusted, signature)


def saved_settings(state: dict[str, Any], trust: bool = False) -> tuple[Settings, bool]:
    """The settings of a checkpoint, and whether code that they name may run: the user says so, or signed them."""
    settings = settings_from_dict(state["settings"])
    return settings, trust or is_signed(settings_to_dict(settings), state["settings"].get(SIGNATURE))


def _layouts(structure: dict[str, Any] | None) -> tuple[SpaceLayout | None, ActionLayout | None]:
    """How the env's own spaces and the flat ones belong together; (None, None) where the env was not emulated."""
    if structure is None:
        return None, None
    return layout_from_dict(structure["observation"]), ActionLayout(space_from_dict(structure["action"]))


def load_weights(policy: Policy, weights: dict[str, Any], file: Path) -> None:
    """Load the weights of a checkpoint into a policy that is built like the one it was saved from.

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
