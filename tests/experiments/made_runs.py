"""Run folders as training leaves them, made without training."""

import json

from hurtle.runners.settings import make_settings, settings_to_dict
from hurtle.tracking.json_text import to_json
from hurtle.tracking.run_folder import RunFolder


def make_run(
    parent,
    seed=0,
    env="cartpole",
    algorithm="ppo",
    name=None,
    slope=1.0,
    points=11,
    total_steps=1000,
    stopped_by="total_steps",
    evaluation=None,
    returns=None,
    **settings,
):
    """A run whose return rises by `slope` each 100 steps, 0.5 seconds each; without a summary if `stopped_by` is None."""
    folder = RunFolder.create(parent, env, algorithm, seed, name)
    given = {"algorithm": algorithm, "seed": seed, "total_steps": total_steps, **settings}
    folder.write_config(settings_to_dict(make_settings(env, given)))
    folder.write_about({"seed": seed})
    returns = [slope * k for k in range(points)] if returns is None else returns
    lines = [
        {
            "step": 100 * k,
            "steps": 100 * k,
            "seconds": 0.5 * k,
            "episode_return": value,
            "value_loss": 1 / (k + 1),
            "episodes": k,
        }
        for k, value in enumerate(returns)
    ]
    folder.metrics_file.write_text("".join(map(to_json, lines)))
    if stopped_by is not None:
        last = lines[-1] if lines else {"steps": 0, "seconds": 0.0, "episode_return": None}
        found = {"mean": evaluation, "low": evaluation, "high": evaluation} if evaluation is not None else None
        folder.write_summary(
            {
                "steps": last["steps"],
                "seconds": last["seconds"],
                "steps_per_second": 200.0,
                "mean_return": last["episode_return"],
                "stopped_by": stopped_by,
                "evaluation": found,
            }
        )
    return folder.path


def append(path, text):
    """More text at the end of a run's metrics."""
    with (path / "metrics.jsonl").open("a") as file:
        file.write(text if isinstance(text, str) else json.dumps(text) + "\n")
