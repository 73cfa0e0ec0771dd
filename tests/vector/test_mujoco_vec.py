"""`MujocoVecEnv` keeps the promises of our other vectors (seeds, autoreset, resets, states, errors); tasks of one's own."""

import copy
import json
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec, WrapperSpec
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

import hurtle
from hurtle.errors import ActionError, EnvDefinitionError, HurtleError, ResetMaskError, UnknownNameError
from hurtle.mujoco import Task
from hurtle.vector.mujoco_vec import MujocoVecEnv
from hurtle.vector.vec_env import VecEnvClosedError

pytest.importorskip("mujoco", reason="needs hurtle[mujoco]")

XML = """
<mujoco>
  <option timestep="0.01"/>
  <worldbody>
    <body name="cart"><joint name="slide" type="slide" axis="1 0 0" damping="0.1"/><geom size="0.1" mass="1"/></body>
  </worldbody>
  <actuator><motor name="push" joint="slide" ctrlrange="-1 1" gear="2"/></actuator>
</mujoco>
"""


BALLS = "".join(f'<body pos="0 0 {0.01 * k}"><freejoint/><geom size="0.1"/></body>' for k in range(20))
CROWD = XML.replace("<worldbody>", f"<size memory='20K'/><worldbody>{BALLS}")  # more contacts than fit into so little
CLIPPED = WrapperSpec("ClipAction", "gymnasium.wrappers:ClipAction", {})


class Cart(Task):
    """Stay at the origin."""

    xml_file = XML
    frame_skip = 2
    max_episode_steps = 40
    width_of_track: float = 0.05
    reset_noise_scale = 0.04

    def terminated(self, s):
        return np.abs(s.qpos[:, 0]) > self.width_of_track

    def reward(self, s):
        moved = (s.qpos[:, 0] - s.before.qpos[:, 0]) / self.dt
        return 1.0 - np.abs(s.qpos[:, 0]), {"moved": moved}

    def infos(self, s):
        return {"place": s.qpos[:, 0]}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo leaves a log file behind


def copied(value):
    return copy.deepcopy(value)


def assert_same_bits(got, expected):
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key in expected:
            assert_same_bits(got[key], expected[key])
    elif isinstance(expected, list | tuple):
        for one, other in zip(got, expected, strict=True):
            assert_same_bits(one, other)
    else:
        assert (got.dtype, got.shape, got.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


def actions_of(vec, count, seed=0):
    shape = (count, vec.num_envs, *vec.single_action_space.shape)
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32) * vec.single_action_space.high


def play(vec, count, seed=0):
    return [copied(vec.step(action)) for action in actions_of(vec, count, seed)]


# What it computes.


@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
@pytest.mark.parametrize("env", ["Hopper-v5", Cart])
def test_equals_the_serial_back_end(env, mode):
    """Trajectories, seeds per env, episodes, final infos, resets of some envs: all that a user sees."""
    options = {"max_episode_steps": 12} if isinstance(env, str) else {}
    with (
        hurtle.make_vec(env, 4, backend="mujoco", seed=3, autoreset_mode=mode, **options) as vec,
        hurtle.make_vec(env, 4, backend="serial", seed=3, autoreset_mode=mode, **options) as serial,
    ):
        ended = 0
        for t, action in enumerate(actions_of(vec, 90)):
            if t % 30 == 0:
                mask = np.array([True, t == 0, True, False])
                given = [({}, None), ({"options": {"reset_mask": mask}}, None), ({"seed": [7, None, 9, None]}, None)][t // 30][
                    0
                ]
                obs, infos = vec.reset(**given)
                wanted, wanted_infos = serial.reset(**given)
                np.testing.assert_array_equal(obs, wanted)
                rows = wanted_infos["_place" if env is Cart else "_x_position"]
                assert_rows(infos, wanted_infos, rows)
                assert vec.np_random_seed == serial.np_random_seed
            obs, *outcome, infos = vec.step(action)
            wanted, *wanted_outcome, wanted_infos = serial.step(action)
            np.testing.assert_array_equal(obs, wanted)
            for one, other in zip(outcome, wanted_outcome, strict=True):
                np.testing.assert_array_equal(one, other)
                assert one.dtype == other.dtype
            assert infos.keys() == wanted_infos.keys()
            assert_rows(infos, wanted_infos, None)
            ended += "episode" in infos
        assert ended > 3


def assert_rows(infos, wanted, rows):
    """Arrays of infos are equal in the rows that their masks name."""
    for key, expected in wanted.items():
        if key.startswith("_"):
            assert infos[key].tolist() == expected.tolist(), key
        elif isinstance(expected, dict):
            assert_rows(infos[key], expected, wanted.get(f"_{key}", rows))
        else:
            named = wanted.get(f"_{key}", rows)
            np.testing.assert_array_equal(infos[key][named], expected[named], err_msg=key)


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("name", ["Ant-v5", "Humanoid-v5", "Reacher-v5"])
def test_neither_threads_nor_other_envs_make_a_difference(name):
    runs = {}
    for threads in (1, 3):
        with hurtle.make_vec(name, 5, num_workers=threads, max_episode_steps=9) as vec:
            vec.reset(seed=20)
            runs[threads] = play(vec, 25)
    assert_same_bits(runs[3], runs[1])
    with hurtle.make_vec(name, 1, max_episode_steps=9) as alone:
        alone.reset(seed=23)
        for action, (obs, rewards, *_) in zip(actions_of(vec, 25), runs[1], strict=True):
            own = alone.step(action[3:4])
            assert (own[0].tobytes(), own[1].tobytes()) == (obs[3:4].tobytes(), rewards[3:4].tobytes())


def test_copies_are_kept_and_other_arrays_reused():
    with hurtle.make_vec(Cart, 2, copy=True) as copying, hurtle.make_vec(Cart, 2) as reusing:
        for vec, kept in ((copying, True), (reusing, False)):
            vec.reset(seed=0)
            first, second = (vec.step(np.ones((2, 1))) for _ in range(2))
            assert (not np.shares_memory(first[0], second[0])) == kept
            assert (not np.shares_memory(first[4]["place"], vec._batch.state.qpos)) or not kept


def test_resets_one_env():
    with hurtle.make_vec(Cart, 3) as vec:
        with pytest.raises(ResetNeeded):
            vec.reset_env(0)
        vec.reset(seed=0)
        before = play(vec, 5)[-1][0]
        obs, info = vec.reset_env(-2, seed=11)
        assert vec.np_random_seed == (0, 11, 2)
        with hurtle.make_vec(Cart, 1) as other:
            np.testing.assert_array_equal(other.reset(seed=11)[0][0], obs)
        assert info == {"place": obs[0]}
        np.testing.assert_array_equal(np.stack(vec.get_attr("qpos"))[[0, 2], 0], before[[0, 2], 0])


def test_one_after_the_other():
    with hurtle.make_vec(Cart, 2) as vec, hurtle.make_vec(Cart, 2) as other:
        vec.async_reset(seed=4)
        obs, rewards, terminated, truncated, infos = vec.recv()
        np.testing.assert_array_equal(obs, other.reset(seed=4)[0])
        assert not rewards.any()
        assert not (terminated | truncated).any()
        assert infos["env_id"].tolist() == [0, 1]
        for action in actions_of(vec, 4):
            vec.send(action)
            with pytest.raises(HurtleError, match="call recv"):
                vec.step(action)
            np.testing.assert_array_equal(vec.recv()[0], other.step(action)[0])
        with pytest.raises(HurtleError, match="wait forever"):
            vec.recv()
        with pytest.raises(HurtleError, match="leave out env_id"):
            vec.send(action[:1], env_id=[0])


def test_reads_fields_and_options():
    with hurtle.make_vec(Cart, 3, width_of_track=0.5) as vec:
        obs, _ = vec.reset(seed=0)
        assert np.concatenate(vec.get_attr("qpos")).tolist() == obs[:, 0].tolist()
        assert vec.get_attr("width_of_track", indices=[0, 2]) == (0.5, 0.5)
        with pytest.raises(UnknownNameError, match=r"Did you mean width_of_track\?"):
            vec.get_attr("width_of_trak")
        with pytest.raises(HurtleError, match="make a new vector"):
            vec.set_attr("width_of_track", 1.0)


# What is refused.


def test_wrong_actions_masks_and_a_closed_vector():
    vec = hurtle.make_vec(Cart, 3)
    with pytest.raises(ResetNeeded):
        vec.step(np.zeros((3, 1)))
    vec.reset(seed=0)
    for wrong in (np.zeros((2, 1)), np.zeros(3), 0, np.zeros((3, 1), complex)):
        with pytest.raises(ActionError, match=r"must be float32 of shape \(3, 1\)"):
            vec.step(wrong)
    for mask in (np.ones(2, bool), np.zeros(3, bool), np.ones(3, int)):
        with pytest.raises(ResetMaskError):
            vec.reset(options={"reset_mask": mask})
    for options in ({"gravity": 1.0}, {"reset_mask": np.ones(3, bool), "gravity": 1.0}):
        with pytest.raises(HurtleError, match="no options of reset but reset_mask, got gravity"):
            vec.reset(options=options)
    for seed in ("7", -1, [1, 2], [1, 2, -3]):
        with pytest.raises(HurtleError, match="seed"):
            vec.reset(seed=seed)
    vec.step([[0], [1], [0]])
    with pytest.raises(HurtleError, match="cannot be copied or pickled"):
        copy.deepcopy(vec)
    vec.close()
    vec.close()
    for call in (vec.reset, vec.recv, vec.state_dict, lambda: vec.step(np.zeros((3, 1))), lambda: vec.get_attr("qpos")):
        with pytest.raises(VecEnvClosedError, match="closed"):
            call()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 2}, "does not take batch_size=2"),
        ({"autoreset_mode": "Disabled"}, "does not take autoreset_mode='Disabled'"),
        ({"order": "fair", "emulate": True}, "does not take order='fair' and emulate"),
        ({"step_timeout": 1.0}, "does not take step_timeout"),
        ({"restart_workers": True}, "does not take restart_workers"),
        ({"render_mode": "ansi"}, "render_mode must be one of"),
        ({"num_workers": 0}, "num_workers must be an int of at least 1"),
        ({"seed": -1}, "seed must be an int of at least 0"),
    ],
)
def test_settings_that_it_does_not_take(options, message):
    with pytest.raises(HurtleError, match=message):
        hurtle.make_vec(Cart, 4, backend="mujoco", **options)


@pytest.mark.parametrize("env", ["CartPole-v1", "cartpole", lambda: gymnasium.make("Hopper-v5"), "Hopper-v4"])
def test_other_envs_are_refused(env):
    with pytest.raises(HurtleError, match="mujoco' is for Gymnasium's v5 MuJoCo tasks"):
        hurtle.make_vec(env, 2, backend="mujoco")


def test_without_mujoco_the_error_names_the_extra(monkeypatch):
    for loaded in [*sys.modules]:
        if loaded == "mujoco" or loaded.startswith(("mujoco.", "gymnasium.envs.mujoco")):
            monkeypatch.delitem(sys.modules, loaded)

    class Missing:
        def find_spec(self, fullname, path=None, target=None):
            if fullname == "mujoco":
                raise ModuleNotFoundError("No module named 'mujoco'", name="mujoco")

    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    for backend in ("auto", "mujoco"):
        with pytest.raises(HurtleError, match=r'Hopper-v5 needs mujoco: pip install "hurtle\[mujoco\]"'):
            hurtle.make_vec("Hopper-v5", 2, backend=backend)
    with pytest.raises(HurtleError, match=r'Cart needs mujoco: pip install "hurtle\[mujoco\]"'):
        hurtle.make_vec(Cart, 2)


# What auto chooses.


def test_auto_takes_it_where_it_steps_the_same_env(monkeypatch):
    spec = gymnasium.spec("Hopper-v5")
    for name, more in (("Tame-v0", {}), ("Clipped-v0", {"additional_wrappers": (CLIPPED,)})):
        made = EnvSpec(name, spec.entry_point, max_episode_steps=5, kwargs={"healthy_reward": 3.0}, **more)
        monkeypatch.setitem(gymnasium.registry, name, made)
    with hurtle.make_vec("Tame-v0", 2, reset_noise_scale=0.0) as vec:
        assert isinstance(vec, MujocoVecEnv)
        assert (vec.spec.id, vec.task.healthy_reward, vec.task.max_episode_steps) == ("Tame-v0", 3.0, 5)
    with hurtle.make_vec("Clipped-v0", 1) as vec:
        assert not isinstance(vec, MujocoVecEnv)
    others = ({"batch_size": 1, "step_timeout": 30.0}, {"autoreset_mode": "Disabled"}, {"emulate": True}, {"check": False})
    for num_envs, options in zip((2, 1, 1, 1), others, strict=True):
        with hurtle.make_vec("InvertedPendulum-v5", num_envs, **options) as vec:
            assert isinstance(vec, MujocoVecEnv) == ("check" in options)


# States.


@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
@pytest.mark.parametrize("name", ["Ant-v5", "Hopper-v5", "Pusher-v5"])
@pytest.mark.usefixtures("all_threads")
def test_goes_on_bitwise(name, mode):
    def make(threads):
        return hurtle.make_vec(name, 3, num_workers=threads, autoreset_mode=mode, max_episode_steps=13)

    with make(2) as vec, make(1) as fresh:
        vec.reset(seed=[5, 2**64 + 3, 1])
        play(vec, 13)  # with NEXT_STEP, resets are due now
        state = json.loads(
            json.dumps({name: [str(a.dtype), a.shape, a.tobytes().hex()] for name, a in vec.state_dict().items()})
        )
        state = {k: np.frombuffer(bytes.fromhex(data), kind).reshape(shape) for k, (kind, shape, data) in state.items()}
        assert {array.dtype.kind for array in state.values()} <= set("biuf")
        expected = play(vec, 40, seed=1)
        fresh.load_state_dict(state)
        assert_same_bits(play(fresh, 40, seed=1), expected)
        assert_same_bits(fresh.state_dict(), vec.state_dict())
        assert fresh.np_random_seed == vec.np_random_seed == (5, 2**64 + 3, 1)
        assert sum(int(each[3].sum()) for each in expected) > 0
        np.testing.assert_array_equal(fresh.reset()[0], vec.reset()[0])


def test_before_the_first_reset_the_seed_is_still_to_come():
    with hurtle.make_vec(Cart, 2, seed=11) as vec, hurtle.make_vec(Cart, 2) as fresh:
        fresh.load_state_dict(vec.state_dict())
        np.testing.assert_array_equal(fresh.reset()[0], vec.reset()[0])


def test_states_of_other_vectors_are_refused_and_change_nothing():
    with hurtle.make_vec(Cart, 2) as vec, hurtle.make_vec(Cart, 2, width_of_track=1.0) as other:
        vec.reset(seed=0)
        state = vec.state_dict()
        for wrong, message in [
            (other.state_dict(), r"another vector. Its options: \{'width_of_track': '1.0'\}; here: \{\}"),
            ({k: v for k, v in state.items() if k != "obs"}, "lacks 'obs'"),
            (state | {"more": np.zeros(1)}, "unknown array 'more'"),
            (state | {"rewards": np.zeros(3)}, r"'rewards' must be float64 of shape \(2,\)"),
        ]:
            with pytest.raises(HurtleError, match=message):
                vec.load_state_dict(wrong)
        assert_same_bits(vec.state_dict(), state)
        vec.send(np.zeros((2, 1)))
        with pytest.raises(HurtleError, match="still running: call recv"):
            vec.state_dict()


# Tasks of one's own.


def test_a_task_is_an_env_too():
    env = hurtle.make(Cart, width_of_track=0.2)
    check_env(env, skip_render_check=True)
    assert (env.task.width_of_track, env.metadata["render_fps"]) == (0.2, 50)
    obs, info = env.reset(seed=3)
    with hurtle.make_vec(Cart(width_of_track=0.2), 2) as vec:
        np.testing.assert_array_equal(vec.reset(seed=2)[0][1], obs)
        steps = [vec.step(np.full((2, 1), 0.7)) for _ in range(2)]
    env.step(np.full(1, 0.7))
    obs, reward, terminated, truncated, info = env.step(np.full(1, 0.7))
    np.testing.assert_array_equal(steps[1][0][1], obs)
    assert (reward, info["moved"]) == (steps[1][1][1], steps[1][4]["moved"][1])
    assert (type(reward), type(terminated), type(truncated)) == (float, bool, bool)
    with pytest.raises(ActionError, match="does not fit"):
        env.step(np.zeros(2))
    env.close()


def test_tasks_travel_to_workers():
    for env, options in ((Cart, {"width_of_track": 0.3}), (Cart(width_of_track=0.3), {})):
        with hurtle.make_vec(env, 2, backend="process", num_workers=1, **options) as vec, hurtle.make_vec(Cart, 2) as own:
            np.testing.assert_array_equal(vec.reset(seed=1)[0], own.reset(seed=1)[0])


def test_tasks_are_found_in_files(tmp_path):
    (tmp_path / "robot.xml").write_text(XML)
    (tmp_path / "robot.py").write_text(
        "import numpy as np\nfrom hurtle.mujoco import Task\n\n\nclass Robot(Task):\n    xml_file = 'robot.xml'\n"
        "    scale: float = 1.0\n\n    def reward(self, s):\n        return self.scale * np.ones(s.num_envs)\n"
    )
    (tmp_path / "elsewhere").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path / "elsewhere")  # the XML lies beside the class
        with hurtle.make_vec("../robot.py:Robot", 2, scale=2.0) as vec:
            vec.reset(seed=0)
            assert vec.step(np.zeros((2, 1)))[1].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ({"observe": lambda self, s: s.qpos[0]}, EnvDefinitionError, r"observe must return arrays \[num_envs, …\].*got \(1,\)"),
        ({"reward": lambda self, s: 1.0}, EnvDefinitionError, r"reward must return \[num_envs\], here \(2,\); got \(\)"),
        ({"terminated": lambda self, s: s.qpos > 0}, EnvDefinitionError, r"terminated must return \[num_envs\].*\(2, 1\)"),
        ({"reward": Task.reward}, NotImplementedError, r"Write: def reward\(self, s\)"),
        ({"reward": lambda self, s: s.xpos}, UnknownNameError, r"no 'xpos'.*fields = \('qpos', 'qvel', 'xpos'\)"),
        ({"fields": ("qpos", "xposs")}, UnknownNameError, r"'xposs' is not an array of MjData.*Did you mean xpos"),
        ({"fields": ("qpos", "efc_force")}, UnknownNameError, "'efc_force' is not an array of MjData with a fixed number"),
        ({"xml_file": XML.replace('ctrlrange="-1 1"', "")}, HurtleError, "actuators without a ctrlrange: push"),
        ({"xml_file": XML.replace("geom", "gem")}, HurtleError, r"Other: MuJoCo cannot load its XML: (?s:.)*gem"),
        ({"xml_file": CROWD}, HurtleError, r"Other: MuJoCo cannot step this model: (?s:.)*increase <size memory"),
        (
            {"reset": lambda self, rng: (np.zeros(2), np.zeros(1))},
            EnvDefinitionError,
            r"1 positions and 1 velocities; .*\(2,\)",
        ),
        ({"xml_file": ""}, HurtleError, "Other: no file ''"),
        ({"terminated": lambda self, s: s.qpos[:, self.body("wagon")] > 0}, UnknownNameError, "no body 'wagon'. Known: .*cart"),
    ],
)
def test_mistakes_in_a_task(body, kind, message):
    with pytest.raises(kind, match=message):
        hurtle.make_vec(type("Other", (Cart,), body), 2)


def test_options_of_a_task():
    assert repr(Cart(width_of_track=1.0)) == "Cart(width_of_track=1.0)"
    with pytest.raises(UnknownNameError, match=r"Cart has no option 'width_of_trak'. Did you mean width_of_track\?"):
        hurtle.make_vec(Cart, 2, width_of_trak=1.0)
    with pytest.raises(HurtleError, match="is an instance; pass its parameters to its constructor"):
        hurtle.make_vec(Cart(), 2, width_of_track=1.0)


# Pictures and training.

DRAW = """
import gymnasium, hurtle, numpy as np
vec = hurtle.make_vec("Hopper-v5", 2, render_mode="rgb_array", width=64, height=48)
vec.reset(seed=0)
vec.step(np.zeros((2, 3)))
try:
    pictures = vec.render()
except hurtle.HurtleError as error:
    print(error)
    raise SystemExit
env = gymnasium.make("Hopper-v5", render_mode="rgb_array", width=64, height=48)
env.reset(seed=1)
env.step(np.zeros(3))
np.testing.assert_array_equal(pictures[1], env.render())
np.testing.assert_array_equal(vec.call("render", indices=1)[0], pictures[1])
assert pictures[1].shape == (48, 64, 3) and pictures[1].std() > 10
vec.close()
print("drawn")
"""


@pytest.mark.slow
def test_pictures_are_gymnasiums(run_python):
    said = run_python(DRAW, MUJOCO_GL="egl").stdout
    if "MuJoCo cannot draw here" in said:
        pytest.skip("this machine cannot draw")
    assert "drawn" in said


def test_a_machine_that_cannot_draw(monkeypatch):
    def fail(self):
        raise RuntimeError("no display")

    monkeypatch.setattr("hurtle.mujoco.pictures.Pictures._new_renderer", fail)
    with hurtle.make_vec("Hopper-v5", 2, render_mode="rgb_array") as vec:
        vec.reset(seed=0)
        with pytest.raises(HurtleError, match=r"cannot draw here: RuntimeError: no display.*MUJOCO_GL to egl"):
            vec.render()
    with hurtle.make_vec(Cart, 2) as vec:
        assert vec.render() is None


def test_a_run_that_was_resumed_is_the_run_that_was_not(tmp_path):
    settings = {"num_envs": 4, "num_steps": 16, "minibatch_size": 32, "num_epochs": 2, "hidden_sizes": (16,), "preset": False}
    settings |= {"progress": "quiet", "trackers": (), "eval_episodes": 2, "runs": str(tmp_path), "total_steps": 6 * 64}
    whole = hurtle.train("Hopper-v5", env_parameters={"max_episode_steps": 30}, **settings)
    half = hurtle.train(
        "Hopper-v5", env_parameters={"max_episode_steps": 30}, callbacks=[lambda trainer: trainer.updates < 3], **settings
    )
    rest = hurtle.train(resume=half)
    from hurtle.tracking.checkpoints import load_checkpoint  # torch; workers import this file for its tasks

    weights = [load_checkpoint(max((run.path / "checkpoints").glob("step-*.pt")))["policy"] for run in (whole, rest)]
    assert (half.steps, rest.steps) == (192, 384)
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[0][name].numpy().tobytes() == weights[1][name].numpy().tobytes() for name in weights[0])
