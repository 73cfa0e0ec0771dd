"""MuJoCo's tasks as array functions step like Gymnasium's own envs, transition by transition, with each of their options."""

import inspect

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import hurtle
from hurtle.errors import HurtleError, UnknownNameError
from hurtle.mujoco.gymnasium_tasks import _TASKS, task_of

pytest.importorskip("mujoco", reason="needs hurtle[mujoco]")

RUNNER = {"forward_reward_weight": 2.0, "ctrl_cost_weight": 0.3, "exclude_current_positions_from_observation": False}
WALKER = RUNNER | {"healthy_reward": 0.7, "healthy_angle_range": (-0.15, 0.1), "reset_noise_scale": 0.02}
HUMANOID = {
    "ctrl_cost_weight": 0.2,
    "reset_noise_scale": 0.05,
    "exclude_current_positions_from_observation": False,
    "frame_skip": 3,
}
PARTS = [f"include_{name}_in_observation" for name in ("cinert", "cvel", "qfrc_actuator", "cfrc_ext")]
OPTIONS = {
    "Ant-v5": [
        RUNNER
        | {"contact_cost_weight": 0.02, "healthy_reward": 0.5, "main_body": "torso", "healthy_z_range": (0.4, 0.9)}
        | {"contact_force_range": (-0.5, 0.7), "reset_noise_scale": 0.05, "include_cfrc_ext_in_observation": False},
        {"terminate_when_unhealthy": False, "main_body": 3, "frame_skip": 3, "max_episode_steps": 9},
    ],
    "HalfCheetah-v5": [RUNNER | {"reset_noise_scale": 0.3, "frame_skip": 2, "max_episode_steps": 9}],
    "Hopper-v5": [
        WALKER | {"healthy_z_range": (0.9, 2.0), "healthy_state_range": (-2.0, 2.0)},
        {"terminate_when_unhealthy": False, "frame_skip": 2, "max_episode_steps": 9},
    ],
    "Humanoid-v5": [
        HUMANOID
        | {"forward_reward_weight": 2.0, "contact_cost_weight": 1e-5, "contact_cost_range": (-1.0, 0.5), "healthy_reward": 2.0}
        | {"healthy_z_range": (1.2, 1.9), PARTS[0]: False, PARTS[2]: False},
        {"terminate_when_unhealthy": False, PARTS[1]: False, PARTS[3]: False, "max_episode_steps": 9},
    ],
    "HumanoidStandup-v5": [
        HUMANOID | {"uph_cost_weight": 2.0, "impact_cost_weight": 1e-5, "impact_cost_range": (-1.0, 0.5), PARTS[1]: False},
        {PARTS[0]: False, PARTS[2]: False, PARTS[3]: False, "max_episode_steps": 9},
    ],
    "InvertedDoublePendulum-v5": [{"healthy_reward": 3.0, "reset_noise_scale": 0.2, "frame_skip": 2}],
    "InvertedPendulum-v5": [{"reset_noise_scale": 0.1, "frame_skip": 3}],
    "Pusher-v5": [{"reward_near_weight": 0.1, "reward_dist_weight": 2.0, "reward_control_weight": 0.3, "frame_skip": 2}],
    "Reacher-v5": [{"reward_dist_weight": 2.0, "reward_control_weight": 0.3, "frame_skip": 3}],
    "Swimmer-v5": [RUNNER | {"reset_noise_scale": 0.3, "frame_skip": 2, "max_episode_steps": 9}],
    "Walker2d-v5": [
        WALKER | {"healthy_z_range": (0.9, 1.9)},
        {"terminate_when_unhealthy": False, "frame_skip": 2, "max_episode_steps": 9},
    ],
}
CASES = [(name, options) for name, several in OPTIONS.items() for options in ({}, *several)]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo leaves a log file behind


def close(ours, theirs):
    """Equal but for the last bits of sums and of trigonometric functions; physics itself is equal in every bit."""
    return np.allclose(ours, theirs, rtol=1e-10, atol=1e-10)


def assert_same_infos(ours, theirs):
    plain = [key for key in theirs if not key.startswith(("_", "final_", "episode"))]
    assert set(plain) == {key for key in ours if not key.startswith(("_", "final_", "episode"))}
    for key in plain:
        rows = theirs[f"_{key}"]
        assert ours[f"_{key}"].tolist() == rows.tolist(), key
        assert close(ours[key][rows], np.asarray(theirs[key])[rows]), key


def compare(name, options, transitions, mode="SAME_STEP", num_envs=4):
    """Step ours and Gymnasium's with the same seeds and actions; returns how many episodes ended."""
    ended, autoreset = 0, AutoresetMode[mode]
    theirs = SyncVectorEnv(
        [lambda: gymnasium.make(name, disable_env_checker=True, **options)] * num_envs, autoreset_mode=autoreset
    )
    with hurtle.make_vec(name, num_envs, backend="mujoco", autoreset_mode=autoreset, seed=7, **options) as vec:
        assert vec.single_observation_space == theirs.single_observation_space
        assert vec.single_action_space == theirs.single_action_space
        vec.action_space.seed(3)
        obs, infos = vec.reset()
        wanted, wanted_infos = theirs.reset(seed=7)
        np.testing.assert_allclose(obs, wanted, rtol=1e-12)
        assert_same_infos(infos, wanted_infos)
        for _ in range(transitions // num_envs):
            action = vec.action_space.sample()
            obs, *outcome, infos = vec.step(action)
            wanted, *wanted_outcome, wanted_infos = theirs.step(action)
            np.testing.assert_allclose(obs, wanted, rtol=1e-12)
            assert close(outcome[0], wanted_outcome[0])
            assert [flags.tolist() for flags in outcome[1:]] == [flags.tolist() for flags in wanted_outcome[1:]]
            assert_same_infos(infos, wanted_infos)
            if "final_obs" in wanted_infos:
                rows = wanted_infos["_final_obs"]
                assert infos["_final_obs"].tolist() == rows.tolist()
                np.testing.assert_allclose(infos["final_obs"][rows], np.stack(wanted_infos["final_obs"][rows]), rtol=1e-12)
                assert_same_infos(infos["final_info"], wanted_infos["final_info"])
            else:
                assert "final_obs" not in infos
            ended += int((outcome[1] | outcome[2]).sum())
    theirs.close()
    return ended


def test_each_task_of_gymnasium_is_here():
    named = {
        name: spec for name, spec in gymnasium.registry.items() if name.endswith("-v5") and "mujoco" in str(spec.entry_point)
    }
    assert set(named) == set(OPTIONS)
    assert {type(task_of(spec, {})) for spec in named.values()} == set(_TASKS.values())


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda case: case if isinstance(case, str) else "-".join(case)[:30])
def test_steps_like_gymnasium(name, options):
    compare(name, options, 80 if options else 200)


@pytest.mark.parametrize("name", ["Hopper-v5", "InvertedDoublePendulum-v5", "Reacher-v5"])
def test_resets_in_the_next_step_like_gymnasium(name):
    assert compare(name, {"max_episode_steps": 20}, 400, "NEXT_STEP") > 8


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda case: case if isinstance(case, str) else "-".join(case)[:30])
def test_steps_like_gymnasium_for_long(name, options):
    ended = compare(name, options, 10_000, "NEXT_STEP" if "max_episode_steps" in options else "SAME_STEP")
    assert ended >= 4  # the time limit: 2,500 steps of each env


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_gymnasiums(name):
    """Every option of the constructor is here, with the same default, and is tried above."""
    spec = gymnasium.spec(name)
    made = gymnasium.envs.registration.load_env_creator(spec.entry_point)
    parameters = list(inspect.signature(made.__init__).parameters.values())[1:-1]  # without self and **kwargs
    ours = type(task_of(spec, {})).options()
    for parameter in parameters:
        one, other = ours[parameter.name], parameter.default
        if isinstance(other, dict):
            one, other = ({key: np.asarray(value).tolist() for key, value in config.items()} for config in (one, other))
        assert one == other, parameter.name
    tried = {key for options in OPTIONS[name] for key in options}
    assert {parameter.name for parameter in parameters} <= tried | {"xml_file", "default_camera_config"}
    assert task_of(spec, {}).max_episode_steps == spec.max_episode_steps


def test_a_model_of_ones_own(tmp_path):
    given = task_of(gymnasium.spec("HalfCheetah-v5"), {}).find_file().read_text()
    (tmp_path / "heavy.xml").write_text(given.replace("14", "20", 1))
    assert (tmp_path / "heavy.xml").read_text() != given
    for path in (str(tmp_path / "heavy.xml"), "./heavy.xml"):
        compare("HalfCheetah-v5", {"xml_file": path}, 40)


@pytest.mark.parametrize("limit", [None, -1, 3])
def test_time_limits_are_gymnasiums(limit):
    with hurtle.make_vec("Reacher-v5", 2, max_episode_steps=limit) as vec:
        vec.reset(seed=0)
        ends = [t for t in range(1, 61) if vec.step(np.zeros((2, 2), np.float32))[3].any()]
    assert ends == {None: [50], -1: [], 3: list(range(3, 61, 3))}[limit]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"reset_noise": 0.1}, UnknownNameError, r"HalfCheetah has no option 'reset_noise'. Did you mean reset_noise_scale\?"),
        ({"healthy_reward": 1.0}, UnknownNameError, "HalfCheetah has no option 'healthy_reward'"),
        ({"frame_skip": 0}, HurtleError, "frame_skip must be an int of at least 1, got 0"),
        ({"max_episode_steps": 0}, HurtleError, "max_episode_steps must be None or an int of at least 1, got 0"),
        ({"xml_file": "./nowhere.xml"}, HurtleError, "HalfCheetah: no file nowhere.xml"),
        ({"xml_file": "cheetah.xml"}, HurtleError, r"no file .*assets.cheetah.xml"),
        ({"xml_file": "./broken.xml"}, HurtleError, "MuJoCo cannot load ./broken.xml: .*XML"),
    ],
)
def test_wrong_options(options, kind, message, tmp_path):
    (tmp_path / "broken.xml").write_text("<mujoco><body></mujoco>")
    with pytest.raises(kind, match=message):
        hurtle.make_vec("HalfCheetah-v5", 2, **options)
