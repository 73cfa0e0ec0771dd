"""`hurtle.export`: write a trained policy to one file, after checking that it computes what the policy computes.

run → policy → `PolicyGraph` → ONNX or torch.export, with a card inside → parity check → the file. Trains nothing.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from hurtle import __version__
from hurtle.deploy.card import Card, Feeds
from hurtle.deploy.exported import ExportedPolicy
from hurtle.deploy.parity import check_parity
from hurtle.deploy.policy_file import MAX_BYTES, PolicyFile, check_ending
from hurtle.deploy.policy_graph import PolicyGraph
from hurtle.deploy.restore import Restored, find_checkpoint, restore
from hurtle.deploy.writing import policy_bytes
from hurtle.errors import HurtleError, PolicyFileError
from hurtle.policies.saved_spaces import layout_to_dict, space_to_dict
from hurtle.tracking.checkpoints import sync

_ONE_AT_A_TIME = threading.Lock()
"""Tracing and checking change global state: logging, standard output, torch's generator and its argument validation."""


@dataclass(frozen=True)
class Export:
    """A file that was written and checked.

    Attributes:
        path: The file.
        card: Its metadata.
        size: Its size in bytes.
        max_difference: Largest difference from the policy, over all runtimes and observations tried.
        observations: Number of observations tried.
        runtimes: The runtimes compared with torch.
    """

    path: Path
    card: Card
    size: int
    max_difference: float
    observations: int
    runtimes: tuple[str, ...]

    def __str__(self) -> str:
        inputs, outputs = (", ".join(port.name for port in ports) for ports in (self.card.inputs, self.card.outputs))
        return (
            f"wrote       {self.path} ({self.size / 1024:.0f} KiB)\n"
            f"policy      {self.card.env or 'an env without a name'}, {self.card.algorithm}, {self.card.steps:,} steps\n"
            f"tensors     {inputs} → {outputs}\n"
            f"checked     {self.observations} observations, {' and '.join(self.runtimes)} against torch: "
            f"max difference {self.max_difference:.1e}"
        )


def export(
    run: Any,
    path: str | Path,
    *,
    outputs: str | tuple[str, ...] = ("action",),
    stochastic: bool = False,
    masked: bool | None = None,
    policy: nn.Module | type[nn.Module] | str | None = None,
    trust: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Export:
    """Write a trained policy to one file that runs without Hurtle, and check it.

    The file holds the observation normalizer and everything else between the env and the network: `obs` is the env's own
    observation, `action` the env's own action. The state of a recurrent policy is the input `state_in_0` … and the output
    `state_out_0` …, with zeros at the start of an episode. Structured observations have one input per leaf: `obs.camera`.
    Threads that export at the same time take turns.

    Args:
        run: A `Run`, a run folder, "latest", or a checkpoint file.
        path: A file name that ends in .onnx, or in .pt2 for torch.export.
        outputs: What to compute: any of "action", "value" and the parameters of the distribution ("logits", or "mean" and
            "log_std", or "alpha" and "beta"); "heads" stands for all of the latter.
        stochastic: Sample the action, with random numbers drawn inside the file, instead of taking the most likely one.
        masked: Take a mask of legal actions, `mask`, as an input; None: if the run's env has one.
        policy: Your own policy instead of the one that the run names; as for `hurtle.load`.
        trust: Run the policy code that the checkpoint names, even if the run is not yours.
        progress: Called with the name of each step that takes seconds, such as "tracing the network".

    Raises:
        TrustError: The checkpoint names code that you have not allowed.
        HurtleError: The policy cannot be exported like this.
        PolicyFileError: The exported policy computes something else, or the file cannot be written. No file is left then.

    Example:
        >>> run = hurtle.train("cartpole")  # doctest: +SKIP
        >>> print(hurtle.export(run, "cartpole.onnx"))  # doctest: +SKIP
    """
    path, progress = check_ending(path), progress or _ignore
    folder, checkpoint = find_checkpoint(run)
    restored = restore(checkpoint, module=policy, trust=trust)
    masked = restored.has_masks if masked is None else masked
    wanted = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    draws = stochastic and path.suffix == ".pt2"  # an ONNX file gets its random numbers after the parity check
    graph = PolicyGraph(restored.policy, restored.layout, wanted, masked, stochastic, draws)
    card = _card(restored, folder, graph, masked)
    with _ONE_AT_A_TIME:
        content = policy_bytes(restored, graph, card, path, progress)
        file = _read_back(path, content)
        exported = Export(path, file.card, len(content), *_check(file, restored, graph, progress))
    _write(path, content)
    return exported


def _ignore(step: str) -> None:
    pass


def _read_back(path: Path, content: bytes) -> PolicyFile:
    """The file as `hurtle.load` reads it.

    Raises:
        HurtleError: `hurtle.load` would refuse it.
    """
    if len(content) > MAX_BYTES[path.suffix]:
        raise HurtleError(f"{path} would have {len(content):,} bytes; the limit is {MAX_BYTES[path.suffix]:,}.")
    try:
        return PolicyFile.of(path, content)
    except PolicyFileError as error:
        raise HurtleError(f"The policy cannot be exported: {error} Nothing was written.") from None


def _write(path: Path, content: bytes) -> None:
    """Write the whole file or nothing; an older one stays until the new one is on the disk.

    Raises:
        PolicyFileError: It cannot be written.
    """
    part = path.with_name(f".{path.stem}-{os.getpid()}-{secrets.token_hex(4)}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(content)
            sync(part)
            part.replace(path)
            sync(path.parent)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise PolicyFileError(f"Cannot write {path}: {error.strerror or error}.") from None


def _check(
    file: PolicyFile, restored: Restored, graph: PolicyGraph, progress: Callable[[str], None]
) -> tuple[float, int, tuple[str, ...]]:
    """Largest difference over all runtimes that can run the file, number of observations, and the runtimes.

    Actions that an ONNX file samples cannot be compared; they are checked to be in the action space.
    """
    worst, count, runtimes = 0.0, 0, ExportedPolicy.runtimes_of(file)
    has_uniforms = any(port.name == "uniforms" for port in graph.inputs)
    for runtime in runtimes:
        first = ", compiling it if this is the first time" if runtime == "native" else ""
        progress(f"comparing the {runtime} runtime with the policy{first}")
        policy = ExportedPolicy(file, runtime)
        run = partial(_run_without_uniforms, policy) if has_uniforms else policy.run
        difference, tried = check_parity(restored.policy, graph, run, restored.layout, runtime)
        worst, count = max(worst, difference), max(count, tried)
    return worst, count, tuple("torch.export" if runtime == "torch" else runtime for runtime in runtimes)


def _run_without_uniforms(policy: ExportedPolicy, feeds: Feeds) -> Feeds:
    """All outputs except the sampled action, which is only checked to be in the action space."""
    found = policy.run({name: array for name, array in feeds.items() if name != "uniforms"})
    action = found.pop("action", None)
    if action is not None and not all(policy.card.spaces[1].contains(row) for row in action):
        raise PolicyFileError("The exported policy samples actions that are not in its action space. Nothing was written.")
    return found


# The metadata of a file.


def _card(restored: Restored, folder: Path | None, graph: PolicyGraph, masked: bool) -> Card:
    settings, policy = restored.settings, restored.policy
    structure = None
    if restored.layout is not None and restored.action_layout is not None:
        structure = {"observation": layout_to_dict(restored.layout), "action": space_to_dict(restored.action_layout.space)}
    about = _json(folder, "about.json")
    return Card(
        env=_without_folder(str(settings["env"])) if restored.has_named_env else "",
        env_parameters=settings.get("env_parameters", {}),
        algorithm=settings["algorithm"],
        steps=restored.steps,
        mean_return=_mean_return(folder, restored),
        observation_space=space_to_dict(policy.observation_space),
        action_space=space_to_dict(policy.action_space),
        structure=structure,
        distribution=policy.head.kind,
        deterministic=not graph.stochastic,
        masked=masked,
        inputs=tuple(port for port in graph.inputs if port.name != "uniforms"),
        outputs=tuple(graph.outputs),
        seed=settings["seed"],
        hurtle=__version__,
        commit=(about.get("git") or {}).get("commit"),
    )


def _without_folder(env: str) -> str:
    """A reference to a user's file, without the folder, which is private to this machine."""
    file, separator, name = env.rpartition(".py:")
    return f"{Path(file).name}{separator}{name}" if separator else env


def _mean_return(folder: Path | None, restored: Restored) -> float | None:
    """The mean return of the last evaluation of this checkpoint on the run's own env."""
    evaluated, summary = _json(folder, "evaluation.json"), _json(folder, "summary.json")
    if evaluated.get("env") != str(restored.settings["env"]) or evaluated.get("steps") != restored.steps:
        evaluated = (summary.get("evaluation") or {}) if summary.get("steps") == restored.steps else {}
    mean = evaluated.get("mean")
    return float(mean) if isinstance(mean, int | float) and math.isfinite(mean) else None


def _json(folder: Path | None, name: str) -> dict[str, Any]:
    try:
        found = json.loads((folder / name).read_text()) if folder is not None else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
