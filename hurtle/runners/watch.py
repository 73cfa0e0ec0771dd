"""`hurtle watch`: see a trained policy act, in the terminal or as a video.

run → policy × one env that renders → pictures → half blocks in the terminal, or frames of a .mp4 or .gif.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from hurtle.envs.registry import EnvLike, make, resolve
from hurtle.errors import HurtleError
from hurtle.native.env import Env, EnvSpec
from hurtle.native.render import to_ansi
from hurtle.native.single import NativeEnv
from hurtle.runners.evaluate import env_to_play
from hurtle.runners.playing import Player, eval_seed
from hurtle.runners.restore import find_checkpoint, restore
from hurtle.runners.signals import StopSignals
from hurtle.vector.factory import make_vec
from hurtle.vector.options import check_count, check_seed
from hurtle.vector.vec_env import VecEnv

ENDINGS = (".mp4", ".gif")
SMALLEST_VIDEO = 240
"""Pixels across: smaller pictures are enlarged by a whole factor, so that the cells of a grid stay sharp."""


def watch_run(
    path: Any,
    episodes: int = 1,
    video: str | Path | None = None,
    fps: int = 30,
    seed: int = 0,
    sampled: bool = False,
    env: EnvLike | None = None,
    console: Console | None = None,
    device: str = "cpu",
    env_parameters: dict[str, Any] | None = None,
    trust: bool = False,
) -> list[tuple[float, int]]:
    """Show what a run has learned. Ctrl-C ends it, and leaves a video that can be played.

    Args:
        path: A run folder, "latest", or a checkpoint file. Of a run: its best checkpoint if it has one, else the newest.
        episodes: How many.
        video: Write a video to this file, .mp4 or .gif, instead of drawing in the terminal.
        fps: Steps per second.
        seed: Of the env and of sampling.
        sampled: Sample actions instead of taking the most likely ones.
        env: Another env than the run's; needed where that was an object of the caller's.
        console: Where to draw; None: standard output.
        device: Where the policy runs.
        env_parameters: The env's own; those not named are the run's, if the env is.
        trust: Run code that the checkpoint names, also if this user did not sign it.

    Returns:
        Return and length of each episode that ended; with several agents the sum of their rewards divided by their number.
    """
    check_count("episodes", episodes)
    check_count("fps", fps)
    check_seed(seed)
    console = console or Console()
    screen = _Video(Path(video), fps, console) if video is not None else _Terminal(fps, console)
    found = restore(find_checkpoint(path)[1], device=device, trust=trust)
    played, parameters = env_to_play(found, env, env_parameters)
    results: list[tuple[float, int]] = []
    with _make(played, parameters, screen, found.emulated) as vec:
        player = Player(found.policy, vec, deterministic=not sampled, seed=eval_seed(seed), device=device)
        # Ctrl-C asks to stop, and is heard between two steps: in the midst of writing a frame it would spoil the video.
        with screen, StopSignals(screen.ask_to_stop):
            for result in _play(vec, player, screen, eval_seed(seed), episodes):
                results.append(result)
                console.print(f"episode {len(results)}: return {result[0]:g} in {result[1]} steps", highlight=False)
    if screen.asked_to_stop:
        console.print("Stopped.")
    return results


def _play(vec: VecEnv, player: Player, screen: _Screen, seed: int, episodes: int) -> Iterator[tuple[float, int]]:
    """Play and show so many episodes, or until asked to stop; yields the return and length of each."""
    obs, infos = vec.reset(seed=seed)
    for episode in range(1, episodes + 1):
        total, steps, over = 0.0, 0, False
        screen.show(vec, episode, steps, total)
        while not over:
            if screen.asked_to_stop:
                return
            acting = np.array(infos.get("agent_mask", True))  # a copy: the step overwrites it
            actions = player.act(obs, infos)
            obs, rewards, terminated, truncated, infos = vec.step(actions)
            total += float((rewards * acting).mean())
            steps += 1
            ended = np.any(infos.get("_final_obs", False)) if _several(vec) else terminated[0] | truncated[0]
            over = bool(ended)
            player.end(terminated, truncated, np.array([over]))
            if not (over and _several(vec)):  # the next episode has begun already
                screen.show(vec, episode, steps, total)
        yield total, steps
        if not _several(vec) and episode < episodes:
            obs, _, _, _, infos = vec.step(actions)  # resets


def _several(vec: VecEnv) -> bool:
    return getattr(vec, "agents", None) is not None or vec.num_agents > 1


def _make(env: EnvLike, parameters: dict[str, Any], screen: _Screen, emulate: bool) -> VecEnv:
    """One env that renders as the screen needs it."""
    found = resolve(env, parameters)
    if isinstance(found, Env):
        several, mode = EnvSpec.of(found).num_agents > 1, _native_mode(found, screen)
    else:
        made = make(env, **parameters)
        several, mode = callable(made.observation_space), _python_mode(env, made, screen)
        made.close()
    return make_vec(
        env,
        1,
        backend="native" if isinstance(found, Env) else "serial",
        # The last picture of an episode is worth seeing; that an env of several agents is over is told in the same step only.
        autoreset_mode="SameStep" if several else "NextStep",
        render_mode=mode,
        emulate=emulate,
        **parameters,
    )


def _native_mode(env: Env, screen: _Screen) -> str | None:
    if not screen.draws:
        return None
    tried = NativeEnv(env, "rgb_array", debug=True)  # one picture is not worth compiling for
    tried.reset(seed=0)
    try:
        tried.render()
    except HurtleError:  # it renders text, or nothing
        if screen.needs_pixels or EnvSpec.of(env).method("render") is None:
            raise
        return "ansi"
    return "rgb_array"


def _python_mode(env: EnvLike, made: Any, screen: _Screen) -> str | None:
    if not screen.draws:
        return None
    offered = list((getattr(made, "metadata", None) or {}).get("render_modes", []))
    wanted = ["rgb_array"] if screen.needs_pixels else ["ansi", "rgb_array"]
    for mode in wanted:
        if mode in offered:
            return mode
    raise HurtleError(f"{env!r} cannot be shown: it offers the render modes {offered}, and {' or '.join(wanted)} is needed.")


class _Screen:
    """Where pictures go.

    Attributes:
        draws: Whether pictures are wanted at all.
        needs_pixels: Whether text is no picture.
        asked_to_stop: Whether the user has seen enough.
    """

    draws, needs_pixels, asked_to_stop = True, False, False

    def __init__(self, fps: int, console: Console):
        self._fps, self._console = fps, console
        self._live = Live(console=console, auto_refresh=False, transient=self.needs_pixels)  # the last picture stays

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def ask_to_stop(self, why: str) -> None:
        """A signal came."""
        self.asked_to_stop = True

    def show(self, vec: VecEnv, episode: int, steps: int, total: float) -> None:
        """Show the env as it is."""
        raise NotImplementedError

    def _status(self, episode: int, steps: int, total: float) -> Text:
        return Text(f"episode {episode}  step {steps}  return {total:g}", style="bold")


class _Terminal(_Screen):
    """Draws with half blocks, as large as the terminal allows; if there is none, only the results are printed."""

    def __init__(self, fps: int, console: Console):
        super().__init__(fps, console)
        self.draws = console.is_terminal
        self._next = 0.0

    def show(self, vec: VecEnv, episode: int, steps: int, total: float) -> None:
        """Draw, at most `fps` times a second."""
        if not self.draws:
            return
        pictures = vec.render()
        assert pictures is not None
        picture = pictures[0]
        if not isinstance(picture, str):
            picture = to_ansi(_rgb(picture), self._console.width, 2 * (self._console.height - 2))
        time.sleep(max(0.0, self._next - time.perf_counter()))
        self._next = time.perf_counter() + 1 / self._fps
        self._live.update(Group(Text.from_ansi(picture), self._status(episode, steps, total)), refresh=True)


class _Video(_Screen):
    """Writes frames into a file, and how far it is to the terminal."""

    needs_pixels = True

    def __init__(self, file: Path, fps: int, console: Console):
        super().__init__(fps, console)
        if file.suffix not in ENDINGS:
            raise HurtleError(f"video: {str(file)!r} must end in {' or '.join(ENDINGS)}.")
        if not file.parent.is_dir():
            raise HurtleError(f"video: there is no folder {str(file.parent)!r} to write {file.name} into.")
        try:
            import imageio.v2 as imageio
            import imageio_ffmpeg  # noqa: F401 (what imageio writes .mp4 with)
        except ImportError:
            raise HurtleError('Videos need imageio: pip install "hurtle[video]".') from None
        self._file = file
        # Frames are even already, so that ffmpeg need not resize them; a GIF counts in milliseconds.
        gif = file.suffix == ".gif"
        options: dict[str, Any] = {"duration": 1000 / fps, "loop": 0} if gif else {"fps": fps, "macro_block_size": 1}
        self._open = lambda: imageio.get_writer(file, **options)
        self._writer: Any = None

    def show(self, vec: VecEnv, episode: int, steps: int, total: float) -> None:
        """Add a frame."""
        pictures = vec.render()
        assert pictures is not None
        if self._writer is None:
            self._writer = self._open()
        self._writer.append_data(_video_frame(_rgb(pictures[0])))
        status = Text.assemble("writing ", str(self._file), "  ", self._status(episode, steps, total))
        self._live.update(status, refresh=steps % 10 == 0)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self._writer is not None:
            self._writer.close()
            self._console.print(f"wrote {self._file}", highlight=False)


def _rgb(picture: Any) -> np.ndarray:
    """A picture as uint8 [height, width, 3]."""
    image = np.asarray(picture)
    if image.ndim == 2:
        image = image[..., None].repeat(3, axis=2)
    if image.ndim != 3 or image.shape[2] not in (3, 4) or image.dtype != np.uint8:
        raise HurtleError(f"render: expected uint8 [height, width, 3], got {image.dtype} {list(image.shape)}.")
    return image[..., :3]


def _video_frame(image: np.ndarray) -> np.ndarray:
    """Large enough to see, and of even height and width, which video codecs want."""
    factor = max(1, -(-SMALLEST_VIDEO // max(image.shape[:2])))
    image = image.repeat(factor, axis=0).repeat(factor, axis=1)
    height, width = image.shape[:2]
    return np.pad(image, ((0, height % 2), (0, width % 2), (0, 0)))
