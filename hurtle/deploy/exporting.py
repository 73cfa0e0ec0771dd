"""`hurtle.export`: a trained policy as one file, checked against the policy it came from before the file gets its name.

run → policy → `PolicyGraph` → ONNX or torch.export, with a card inside → the same numbers? → the file. Trains nothing.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from hurtle import __version__
from hurtle.deploy.card import Card, Feeds
from hurtle.deploy.exported import ExportedPolicy
from hurtle.deploy.parity import check_parity
from hurtle.deploy.policy_file import MAX_BYTES, PolicyFile
from hurtle.deploy.policy_graph import PolicyGraph
from hurtle.deploy.writing import policy_bytes
from hurtle.errors import HurtleError, PolicyFileError
from hurtle.policies.spaces import layout_to_dict, space_to_dict
from hurtle.runners.config import settings_to_dict
from hurtle.runners.restore import Restored, find_checkpoint, restore
from hurtle.tracking.checkpoints import sync

_ONE_AT_A_TIME = threading.Lock()
"""Tracing and checking set the whole process's logging, output, random numbers and checks of distributions for a while."""


@dataclass(frozen=True)
class Export:
    """A file that was written and checked.

    Attributes:
        path: Where it is.
        card: What it says about itself.
        size: Bytes of the file.
        max_difference: Largest difference from the policy, over all runtimes and observations that were tried.
        observations: How many.
        runtimes: Which runtimes were compared.
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
) -> Export:
    """Write a trained policy to one file that runs without Hurtle, and check it.

    The observation normalizer and everything else between the env and the network is inside: `obs` is what the env shows,
    `action` what it takes. A recurrent policy's memory goes in as `state_in_0` … and comes out as `state_out_0` …, and is
    zeros at the start of an episode. Structured observations have one input per leaf: `obs.camera`. Of several threads that
    export, one works at a time.

    Args:
        run: A `Run`, a run folder, "latest", or a checkpoint file.
        path: Ends in .onnx, or in .pt2 for torch.export.
        outputs: What to compute, one or several of "action", "value" and what the distribution is made of: "logits", or "mean"
            and "log_std", or "alpha" and "beta"; "heads" means these.
        stochastic: Sample the action, with random numbers drawn inside; else it is the most likely one.
        masked: Take legal actions, `mask`, as an input; None: if the run's env gave some.
        policy: Your own policy, instead of what the run names; as for `hurtle.load`.
        trust: Run the policy's code that the checkpoint names, also if it is none of your own runs.

    Raises:
        TrustError: The checkpoint names code that you have not allowed.
        HurtleError: The policy cannot be exported like this.
        PolicyFileError: The exported policy computes something else, or the file cannot be written. There is then no file.

    Example:
        >>> run = hurtle.train("cartpole")  # doctest: +SKIP
        >>> print(hurtle.export(run, "cartpole.onnx"))  # doctest: +SKIP
    """
    path = Path(path)
    if path.suffix not in MAX_BYTES:
        raise HurtleError(f"The file's name must end in {' or '.join(MAX_BYTES)}, got {str(path)!r}.")
    folder, checkpoint = find_checkpoint(run)
    restored = restore(checkpoint, module=policy, trust=trust)
    masked = restored.has_masks if masked is None else masked
    wanted = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    draws = stochastic and path.suffix == ".pt2"  # an ONNX file is given its own random numbers once it is checked
    graph = PolicyGraph(restored.policy, restored.layout, wanted, masked, stochastic, draws)
    card = _card(restored, folder, graph, masked)
    with _ONE_AT_A_TIME:
        content = policy_bytes(restored, graph, card, path)
        file = _read_back(path, content)
        exported = Export(path, file.card, len(content), *_check(file, restored, graph))
    _write(path, content)
    return exported


def _read_back(path: Path, content: bytes) -> PolicyFile:
    """The file as `hurtle.load` will see it.

    Raises:
        HurtleError: It would refuse it.
    """
    if len(content) > MAX_BYTES[path.suffix]:
        raise HurtleError(f"{path} would have {len(content):,} bytes, and may have {MAX_BYTES[path.suffix]:,}.")
    try:
        return PolicyFile.of(path, content)
    except PolicyFileError as error:
        raise HurtleError(f"The policy cannot be exported: {error} Nothing was written.") from None


def _write(path: Path, content: bytes) -> None:
    """Write a file that is whole or not there; an older one stays until the new one is on the disk.

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


def _check(file: PolicyFile, restored: Restored, graph: PolicyGraph) -> tuple[float, int, tuple[str, ...]]:
    """Largest difference over all runtimes that can run the file; of actions that ONNX samples only that they are actions."""
    worst, count, runtimes = 0.0, 0, ExportedPolicy.runtimes_of(file)
    has_uniforms = any(port.name == "uniforms" for port in graph.inputs)
    for runtime in runtimes:
        policy = ExportedPolicy(file, runtime)
        run = partial(_run_without_uniforms, policy) if has_uniforms else policy.run
        difference, tried = check_parity(restored.policy, graph, run, restored.layout, runtime)
        worst, count = max(worst, difference), max(count, tried)
    return worst, count, tuple("torch.export" if runtime == "torch" else runtime for runtime in runtimes)


def _run_without_uniforms(policy: ExportedPolicy, feeds: Feeds) -> Feeds:
    """All outputs but the sampled action, of which only that it is one is looked at."""
    found = policy.run({name: array for name, array in feeds.items() if name != "uniforms"})
    action = found.pop("action", None)
    if action is not None and not all(policy.card.spaces[1].contains(row) for row in action):
        raise PolicyFileError("The exported policy samples actions that are not in its action space. Nothing was written.")
    return found


# What a file says about itself.


def _card(restored: Restored, folder: Path | None, graph: PolicyGraph, masked: bool) -> Card:
    settings, policy = restored.settings, restored.policy
    structure = None
    if restored.layout is not None and restored.action_layout is not None:
        structure = {"observation": layout_to_dict(restored.layout), "action": space_to_dict(restored.action_layout.space)}
    about = _json(folder, "about.json")
    return Card(
        env=_without_folder(str(settings.train.env)) if restored.has_named_env else "",
        env_parameters=settings_to_dict(settings)["env_parameters"],
        algorithm=settings.train.algorithm,
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
        seed=settings.train.seed,
        hurtle=__version__,
        commit=(about.get("git") or {}).get("commit"),
    )


def _without_folder(env: str) -> str:
    """A reference to a user's file by the file's name alone: its folder is nobody else's business."""
    file, separator, name = env.rpartition(".py:")
    return f"{Path(file).name}{separator}{name}" if separator else env


def _mean_return(folder: Path | None, restored: Restored) -> float | None:
    """Of the last evaluation of this checkpoint on the run's own env."""
    evaluated, summary = _json(folder, "evaluation.json"), _json(folder, "summary.json")
    if evaluated.get("env") != str(restored.settings.train.env) or evaluated.get("steps") != restored.steps:
        evaluated = (summary.get("evaluation") or {}) if summary.get("steps") == restored.steps else {}
    mean = evaluated.get("mean")
    return float(mean) if isinstance(mean, int | float) and math.isfinite(mean) else None


def _json(folder: Path | None, name: str) -> dict[str, Any]:
    try:
        found = json.loads((folder / name).read_text()) if folder is not None else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
