"""`hurtle watch`: show a trained policy acting, in the terminal or as a video.

run → policy × one env that renders → frames → half blocks in the terminal, or a .mp4 or .gif.
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

from hurtle.deploy.restore import find_checkpoint, restore
from hurtle.envs.registry import EnvLike, make, resolve
from hurtle.errors import HurtleError
from hurtle.native.env import Env, EnvSpec
from hurtle.native.render import to_ansi
from hurtle.native.single_env import NativeEnv
from hurtle.runners.evaluate import env_to_play
from hurtle.runners.playing import Player, eval_seed
from hurtle.runners.signals import StopSignals
from hurtle.vector.factory import make_vec
from hurtle.vector.options import check_count, check_seed
from hurtle.vector.vec_env import VecEnv

ENDINGS = (".mp4", ".gif")
SMALLEST_VIDEO = 240
"""Pixels across; smaller frames are enlarged by an integer factor, so that grid cells stay sharp."""


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
    """Show the policy of a run acting. Ctrl-C stops; the video so far stays playable.

    Args:
        path: A run folder, "latest", or a checkpoint file. A run's best checkpoint is used if there is one, else its newest.
        episodes: Number of episodes.
        video: Write a video to this file, .mp4 or .gif, instead of drawing in the terminal.
        fps: Steps per second.
        seed: Seed of the env and of sampled actions.
        sampled: Sample actions instead of taking the most likely ones.
        env: An env to use instead of the run's; required if the run was trained on an object.
        console: Where to draw; None: standard output.
        device: Device of the policy.
        env_parameters: Parameters of the env; on the run's own env, the others are the run's.
        trust: Run code that the checkpoint names, even if this user did not sign it.

    Returns:
        Return and length of each episode that ended; with several agents, the mean of their returns.
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
        # Ctrl-C takes effect between steps: while a frame is being written it would corrupt the video.
        with screen, StopSignals(screen.ask_to_stop):
            for result in _play(vec, player, screen, eval_seed(seed), episodes):
                results.append(result)
                console.print(f"episode {len(results)}: return {result[0]:g} in {result[1]} steps", highlight=False)
    if screen.asked_to_stop:
        console.print("Stopped.")
    return results


def _play(vec: VecEnv, player: Player, screen: _Screen, seed: int, episodes: int) -> Iterator[tuple[float, int]]:
    """Play and show episodes until done or stopped; yields the return and length of each."""
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
            if not (over and _several(vec)):  # the env already shows the next episode
                screen.show(vec, episode, steps, total)
        yield total, steps
        if not _several(vec) and episode < episodes:
            obs, _, _, _, infos = vec.step(actions)  # resets


def _several(vec: VecEnv) -> bool:
    return getattr(vec, "agents", None) is not None or vec.num_agents > 1


def _make(env: EnvLike, parameters: dict[str, Any], screen: _Screen, emulate: bool) -> VecEnv:
    """A vector of one env, rendering in the mode the screen needs."""
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
        # NextStep shows the last frame of an episode; with several agents, only SameStep reports that the env itself ended.
        autoreset_mode="SameStep" if several else "NextStep",
        render_mode=mode,
        emulate=emulate,
        **parameters,
    )


def _native_mode(env: Env, screen: _Screen) -> str | None:
    if not screen.draws:
        return None
    tried = NativeEnv(env, "rgb_array", debug=True)  # compiling is not worth it for one frame
    tried.reset(seed=0)
    try:
        tried.render()
    except HurtleError:  # it renders text, or not at all
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
    raise HurtleError(f"{env!r} cannot be shown: it offers the render modes {offered}, but {' or '.join(wanted)} is needed.")


class _Screen:
    """Where frames go.

    Attributes:
        draws: Whether frames are needed at all.
        needs_pixels: Whether frames must be images; otherwise text will do.
        asked_to_stop: Whether a stop was requested.
    """

    draws, needs_pixels, asked_to_stop = True, False, False

    def __init__(self, fps: int, console: Console):
        self._fps, self._console = fps, console
        self._live = Live(console=console, auto_refresh=False, transient=self.needs_pixels)  # the last frame stays

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def ask_to_stop(self, why: str) -> None:
        """Stop before the next step; called on a signal."""
        self.asked_to_stop = True

    def show(self, vec: VecEnv, episode: int, steps: int, total: float) -> None:
        """Show the current state of the env."""
        raise NotImplementedError

    def _status(self, episode: int, steps: int, total: float) -> Text:
        return Text(f"episode {episode}  step {steps}  return {total:g}", style="bold")


class _Terminal(_Screen):
    """Draws with half blocks, as large as the terminal allows; without a terminal, prints results only."""

    def __init__(self, fps: int, console: Console):
        super().__init__(fps, console)
        self.draws = console.is_terminal
        self._next = 0.0

    def show(self, vec: VecEnv, episode: int, steps: int, total: float) -> None:
        """Draw, at most `fps` times per second."""
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
    """Writes frames into a file, and shows progress in the terminal."""

    needs_pixels = True

    def __init__(self, file: Path, fps: int, console: Console):
        super().__init__(fps, console)
        if file.suffix not in ENDINGS:
            raise HurtleError(f"video: {str(file)!r} must end in {' or '.join(ENDINGS)}.")
        if not file.parent.is_dir():
            raise HurtleError(f"video: there is no folder {str(file.parent)!r} to write {file.name} into.")
        try:
            import imageio.v2 as imageio
            import imageio_ffmpeg  # noqa: F401 (imageio writes .mp4 with it)
        except ImportError:
            raise HurtleError('Videos need imageio: pip install "hurtle[video]".') from None
        self._file = file
        # Frames already have even sizes, so that ffmpeg need not resize them; a GIF takes milliseconds per frame.
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
    """A frame as uint8 [height, width, 3]."""
    image = np.asarray(picture)
    if image.ndim == 2:
        image = image[..., None].repeat(3, axis=2)
    if image.ndim != 3 or image.shape[2] not in (3, 4) or image.dtype != np.uint8:
        raise HurtleError(f"render: expected uint8 [height, width, 3], got {image.dtype} {list(image.shape)}.")
    return image[..., :3]


def _video_frame(image: np.ndarray) -> np.ndarray:
    """Enlarge a small frame, and pad it to even height and width, as video codecs require."""
    factor = max(1, -(-SMALLEST_VIDEO // max(image.shape[:2])))
    image = image.repeat(factor, axis=0).repeat(factor, axis=1)
    height, width = image.shape[:2]
    return np.pad(image, ((0, height % 2), (0, width % 2), (0, 0)))
