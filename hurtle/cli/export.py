"""`hurtle export`: write a run's policy to one file, showing each step."""

from __future__ import annotations

from typing import Annotated, Literal

from hurtle.cli.messages import status
from hurtle.cli.options import POSITIONAL, SWITCH, Run, Runs, Trust, find_run, option


def export(
    run: Run,
    file: Annotated[str, POSITIONAL, option("out.onnx, or out.pt2 for torch.export.", "FILE")],
    outputs: Annotated[
        tuple[str, ...],
        option(
            "Any of action, value and the distribution's parameters (logits; mean, log_std; alpha, beta); heads means all of "
            "the latter.",
            "NAME [NAME ...]",
        ),
    ] = ("action",),
    stochastic: Annotated[bool, SWITCH, option("Sample the action instead of taking the most likely one.", default="")] = False,
    masked: Annotated[
        Literal["auto", "yes", "no"], option("Take a mask of legal actions as an input; auto: if the run's env has one.")
    ] = "auto",
    runs: Runs = "runs",
    trust: Trust = False,
) -> None:
    """Write a policy to one file that runs anywhere, and check it."""
    from hurtle.deploy.policy_file import check_ending

    check_ending(file)
    path = find_run(run, runs)
    with status() as show:
        show("loading torch")
        from hurtle.deploy.exporting import export as write_policy

        wanted = None if masked == "auto" else masked == "yes"
        done = write_policy(path, file, outputs=outputs, stochastic=stochastic, masked=wanted, trust=trust, progress=show)
    print(done)
