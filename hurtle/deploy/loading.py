"""`hurtle.load`: a trained policy, from a run or an exported file, that acts on the env's own observations.

path → checkpoint → `LoadedPolicy` (torch), or → policy file → `ExportedPolicy` (no torch). Makes no env.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hurtle.deploy.acting_policy import ActingPolicy
from hurtle.deploy.policy_file import is_policy_file, read_policy_file
from hurtle.errors import HurtleError

if TYPE_CHECKING:
    from torch import nn


def load(
    path: Any,
    policy: nn.Module | type[nn.Module] | str | None = None,
    device: str = "cpu",
    runtime: str = "auto",
    trust: bool = False,
) -> ActingPolicy:
    """Load the policy of a run, or an exported one; the env is not made.

    Nothing is unpickled. If the run was trained with a policy from a file (`my_policy.py:MyPolicy`), that file is run only if
    you trained the run yourself on this machine, or with `trust=True`.

    Args:
        path: A run folder, "latest", the `Run` that `hurtle.train` returned, a checkpoint file, or a file that `hurtle.export`
            wrote (.onnx, .pt2). A run's best checkpoint is taken if there is one, else its newest.
        policy: Your own policy instead of the one that the run names: its class, "my_policy.py:MyPolicy", or a module built
            like the one that the run was given. Needed if the run was given an object.
        device: "cpu", "cuda", "cuda:1" … or "auto"; exported files run on the CPU.
        runtime: The runtime of an exported file: "native" (compiled, plain MLPs only), "onnxruntime", "torch" (.pt2), or
            "auto", the fastest that can run it.
        trust: Run the policy code that a checkpoint names, even if the run is not yours.

    Raises:
        TrustError: The checkpoint names code that you have not allowed.
        CheckpointError: The checkpoint is missing or damaged.
        PolicyFileError: The exported file is missing or damaged.

    Example:
        >>> policy = load("runs/cartpole")  # doctest: +SKIP
        >>> obs, info = env.reset()  # doctest: +SKIP
        >>> obs, reward, terminated, truncated, info = env.step(policy.act(obs))  # doctest: +SKIP
    """
    if is_policy_file(path):
        from hurtle.deploy.exported import ExportedPolicy

        if policy is not None or device not in ("cpu", "auto"):
            raise HurtleError(f"{path} is an exported policy: it takes no module (policy=…), and runs on the CPU.")
        return ExportedPolicy(read_policy_file(path), runtime)
    if runtime != "auto":
        raise HurtleError(f"runtime={runtime!r} is for exported files (.onnx, .pt2); {path} is a run, and runs in torch.")
    from hurtle.deploy.torch_policy import load_run

    return load_run(path, policy, device, trust)
