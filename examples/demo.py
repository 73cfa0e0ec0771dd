"""What `make demo` shows: native CartPole beside Gymnasium's, then a short animation in the terminal.

python examples/demo.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import gymnasium
import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

import hurtle

NUM_ENVS = 64
SECONDS = 1.0


def steps_per_second(run: Callable[[], int]) -> float:
    """Call `run`, which returns how many env steps it took, for about a second; the rate."""
    run()
    steps, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < SECONDS:
        steps += run()
    return steps / elapsed


def step_loop(vec: gymnasium.vector.VectorEnv) -> Callable[[], int]:
    """A loop of 100 calls of `vec.step` with random actions."""
    vec.reset(seed=0)
    actions = np.random.default_rng(0).integers(0, 2, (100, vec.num_envs))

    def run() -> int:
        for row in actions:
            vec.step(row)
        return len(actions) * vec.num_envs

    return run


def compare(console: Console) -> None:
    """Measure three ways to step 64 CartPoles and print them side by side."""
    gym = gymnasium.make_vec("CartPole-v1", num_envs=NUM_ENVS, vectorization_mode="sync")
    native = hurtle.make_vec("cartpole", num_envs=NUM_ENVS)

    def play() -> int:
        native.play(2_000)
        return 2_000 * NUM_ENVS

    rows = []
    with console.status("measuring …"):
        rows.append(("Gymnasium, SyncVectorEnv.step()", steps_per_second(step_loop(gym))))
        rows.append(("Hurtle, step() from Python", steps_per_second(step_loop(native))))
        rows.append(("Hurtle, the loop compiled too: play()", steps_per_second(play)))

    table = Table(title=f"CartPole, {NUM_ENVS} envs, random actions", title_style="bold", box=None, padding=(0, 3, 0, 0))
    for column in ("", "steps/s", "times Gymnasium"):
        table.add_column(column, justify="left" if not column else "right")
    for name, rate in rows:
        table.add_row(name, f"{rate:,.0f}", f"{rate / rows[0][1]:,.0f}x")
    console.print(table)
    gym.close()
    native.close()


def animate(console: Console, seconds: float = 6.0) -> None:
    """Balance one pole with a simple rule and draw it."""
    env = hurtle.make("cartpole", render_mode="ansi")
    obs, _ = env.reset(seed=3)
    returned = 0.0
    with Live(console=console, auto_refresh=False) as live:
        for _ in range(int(seconds * 30)):
            x, x_dot, theta, theta_dot = obs
            action = int(theta + 0.3 * theta_dot + 0.05 * x + 0.1 * x_dot > 0.0)
            obs, reward, terminated, truncated, _ = env.step(action)
            returned += reward
            live.update(Text.from_ansi(f"{env.render()}\nreturn {returned:.0f}"), refresh=True)
            if terminated or truncated:
                obs, _ = env.reset()
                returned = 0.0
            time.sleep(1 / 30)


def main() -> None:
    """Run the demo."""
    console = Console()
    compare(console)
    if console.is_terminal:
        console.print("\nOne of them, balanced by a rule of one line (Ctrl-C ends it):")
        animate(console)
    console.print(
        "\nNext: [bold].venv/bin/hurtle envs[/bold] lists the environments; docs/write-an-env.md shows how to write one."
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print()
