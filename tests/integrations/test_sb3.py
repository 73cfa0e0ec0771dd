"""Our vector envs as Stable-Baselines3 sees them: its conventions, its wrappers, its algorithms."""

import importlib
import sys
import warnings

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from sample_envs import SHORT_CARTPOLE, Crew, Masked, Shift, Walk

import hurtle
from hurtle.errors import HurtleError

sb3 = pytest.importorskip("stable_baselines3", reason='needs pip install "hurtle[sb3]"')

from stable_baselines3.common.evaluation import evaluate_policy  # noqa: E402
from stable_baselines3.common.monitor import Monitor  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecMonitor, VecNormalize  # noqa: E402

from hurtle.integrations.sb3 import SB3VecEnv, make_sb3_vec  # noqa: E402

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers get its envs without SB3 and torch: that takes seconds
PPO_SETTINGS = {"n_steps": 32, "batch_size": 256, "n_epochs": 20, "gamma": 0.98, "gae_lambda": 0.8, "learning_rate": 1e-3}


class Door(gymnasium.Env):
    """Three steps with a Dict observation."""

    observation_space = spaces.Dict({"key": spaces.Discrete(5), "place": spaces.Box(-9.0, 9.0, (2,), np.float64)})
    action_space = spaces.MultiDiscrete([2, 3])

    def _observe(self):
        return {"key": self.np_random.integers(5), "place": self.np_random.uniform(-9, 9, 2)}

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self._observe(), {}

    def step(self, action):
        self.time += 1
        return self._observe(), float(action[0] + 10 * action[1]), self.time == 3, False, {}


class Cart(gymnasium.Wrapper):
    """Gymnasium's CartPole with infos, an attribute and a method."""

    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1", max_episode_steps=30))
        self.wind = 0.0
        self.steps = 0

    def reset(self, **kwargs):
        obs, _ = super().reset(**kwargs)
        return obs, {"start": float(obs[0])}

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        self.steps += 1
        info = {"x": float(obs[0]), "nested": {"steps": self.steps}}
        return obs, reward, terminated, truncated, info | ({"tilted": True} if abs(obs[2]) > 0.1 else {})

    def double(self, number):
        return 2 * number


def gymnasium_vec(num_envs):
    makers = [lambda: gymnasium.wrappers.RecordEpisodeStatistics(Cart())] * num_envs
    return gymnasium.vector.SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


VECTORS = {
    "gymnasium": gymnasium_vec,
    "serial": lambda n: hurtle.make_vec(Cart, n, backend="serial"),
    "process": lambda n: hurtle.make_vec(Cart, n, backend="process", num_workers=2),
}


@pytest.fixture(params=VECTORS)
def carts(request):
    vec = SB3VecEnv(VECTORS[request.param](3))
    yield vec
    vec.close()


def test_every_step_is_what_sb3s_own_vector_env_gives(carts):
    peer = DummyVecEnv([lambda: Monitor(Cart())] * 3)
    carts.seed(7), peer.seed(7)
    assert np.array_equal(carts.reset(), peer.reset())
    assert carts.reset_infos == peer.reset_infos
    rng, ended, cut = np.random.default_rng(0), 0, 0
    for step in range(150):
        # the first env balances, so that its episodes are cut off; the others fall
        actions = np.array([int(obs[2] > 0) if step % 9 else 1, *rng.integers(0, 2, 2)])
        obs, rewards, dones, infos = carts.step(actions)
        peer_obs, peer_rewards, peer_dones, peer_infos = peer.step(actions)
        assert np.array_equal(obs, peer_obs)
        assert np.array_equal(rewards, peer_rewards)
        assert rewards.dtype == peer_rewards.dtype
        assert np.array_equal(dones, peer_dones)
        for mine, theirs, done in zip(infos, peer_infos, dones, strict=True):
            cut += mine.get("TimeLimit.truncated", False)
            if done:
                ended += 1
                assert np.array_equal(mine.pop("terminal_observation"), theirs.pop("terminal_observation"))
                mine["episode"].pop("t"), theirs["episode"].pop("t")
            else:
                assert theirs.pop("TimeLimit.truncated") is False  # SB3's own says so in every step
            assert mine == theirs
        assert carts.reset_infos == peer.reset_infos
        obs = obs[0]
    assert ended > 10
    assert cut >= 2


def test_dict_observations_are_what_sb3s_own_vector_env_gives():
    vec, peer = make_sb3_vec(Door, 2, backend="serial"), DummyVecEnv([lambda: Monitor(Door())] * 2)
    vec.seed(4), peer.seed(4)
    kept, expected = vec.reset(), peer.reset()
    for _ in range(7):
        obs, rewards, dones, infos = vec.step(np.array([[1, 2], [0, 1]]))
        peer_obs, peer_rewards, peer_dones, peer_infos = peer.step(np.array([[1, 2], [0, 1]]))
        assert np.array_equal(rewards, peer_rewards)
        assert np.array_equal(dones, peer_dones)
        for key in ("key", "place"):
            assert np.array_equal(kept[key], expected[key])
            assert kept[key].dtype == expected[key].dtype
            if dones[1]:
                mine, theirs = infos[1]["terminal_observation"], peer_infos[1]["terminal_observation"]
                assert np.array_equal(mine[key], theirs[key])
        kept, expected = obs, {key: value.copy() for key, value in peer_obs.items()}
    model = sb3.PPO("MultiInputPolicy", vec, n_steps=16, batch_size=32, n_epochs=1, device="cpu").learn(64)
    assert model.ep_info_buffer[0]["l"] == 3


def test_attributes_and_methods_of_single_envs(carts):
    carts.reset()
    assert carts.get_attr("wind") == [0.0, 0.0, 0.0]
    carts.set_attr("wind", 2.5)
    assert carts.get_attr("wind") == [2.5, 2.5, 2.5]
    assert carts.env_method("double", 4) == [8, 8, 8]
    assert carts.has_attr("wind")
    assert not carts.has_attr("nothing_of_this_name")
    if carts.env_is_wrapped(Monitor)[0]:  # ours; Gymnasium's cannot address single envs
        carts.set_attr("wind", 1.0, indices=1)
        assert carts.get_attr("wind", indices=[2, 1]) == [2.5, 1.0]
        assert carts.env_method("double", 3, indices=[0]) == [6]


def test_fields_and_parameters_of_native_envs():
    vec = make_sb3_vec("cartpole", 3)
    vec.reset()
    assert vec.get_attr("gravity") == [pytest.approx(9.8)] * 3
    vec.set_attr("theta", 0.3, indices=[0, 2])
    assert np.array(vec.get_attr("theta", indices=[0, 2])) == pytest.approx(0.3)
    _, _, dones, _ = vec.step(np.zeros(3, int))
    assert dones.tolist() == [True, False, True]
    assert not vec.has_attr("nothing_of_this_name")
    with pytest.raises(HurtleError, match="compile-time constant"):
        vec.set_attr("gravity", 1.6)


def test_what_was_returned_stays_as_it_was():
    vec = make_sb3_vec("cartpole", 4, max_steps=3)
    first = vec.reset()
    kept = first.copy()
    second, rewards, dones, infos = vec.step(np.ones(4, int))
    outcome = second.copy(), rewards.copy(), dones.copy()
    vec.step(np.zeros(4, int))
    *_, infos = vec.step(np.ones(4, int))
    finals = [info["terminal_observation"].copy() for info in infos]
    for _ in range(3):
        vec.step(np.ones(4, int))
    assert np.array_equal(first, kept)
    for mine, then in zip((second, rewards, dones), outcome, strict=True):
        assert np.array_equal(mine, then)
    assert all(np.array_equal(info["terminal_observation"], final) for info, final in zip(infos, finals, strict=True))


def test_infos_are_one_dict_per_env():
    vec = make_sb3_vec("cartpole", 4)
    vec.reset()
    *_, infos = vec.step(np.ones(4, int))
    assert infos == [{}, {}, {}, {}]
    assert len({id(info) for info in infos}) == 4


def test_a_truncated_episode_brings_its_last_observation():
    vec = make_sb3_vec("cartpole", 2, max_steps=3)
    single = hurtle.make("cartpole", max_steps=3)
    vec.seed(5)
    vec.reset()
    single.reset(seed=6)
    for action in (0, 1, 0):
        obs, _, dones, infos = vec.step(np.full(2, action))
        last, *_ = single.step(action)
    assert dones.all()
    assert infos[1]["TimeLimit.truncated"] is True
    assert np.array_equal(infos[1]["terminal_observation"], last)
    assert not np.array_equal(obs[1], last)
    assert (infos[1]["episode"]["r"], infos[1]["episode"]["l"]) == (3.0, 3)
    assert 0 <= infos[1]["episode"]["t"] < 60


def test_a_terminated_episode_is_none_that_ran_out_of_time():
    vec = make_sb3_vec("cartpole", 2)
    vec.reset()
    dones = np.zeros(2)
    while not dones[0]:
        _, _, dones, infos = vec.step(np.ones(2, int))
    assert infos[0]["TimeLimit.truncated"] is False
    assert abs(infos[0]["terminal_observation"][2]) > 0.2


def test_metrics_of_native_envs_come_with_the_episode():
    vec = make_sb3_vec(Walk, 3)
    vec.seed(1)
    vec.reset()
    dones = np.zeros(3)
    while not dones.any():
        _, _, dones, infos = vec.step(np.full(3, 2))
    assert set(infos[int(dones.argmax())]["episode"]) == {"r", "l", "t", "visits", "drift"}


def test_options_reach_the_envs_and_seeds_are_used_once():
    vec = make_sb3_vec(Walk, 2)
    vec.seed(3)
    vec.set_options({"gain": np.array([1.0, 2.0])})
    first = vec.reset()
    _, rewards, _, _ = vec.step(np.full(2, 2))
    assert np.abs(rewards + 0.125).tolist() == [1.0, 2.0]  # the walk pays its gain, in either direction
    assert not all(np.array_equal(first, vec.reset()) for _ in range(5))
    vec.seed(3)
    assert np.array_equal(first, vec.reset())
    with pytest.raises(HurtleError, match="one dict for all envs"):
        vec.set_options([{}, {}])


def test_actions_are_counted_from_zero_for_sb3():
    vec = make_sb3_vec(Masked, 2)  # Discrete(4, start=2)
    assert vec.action_space == spaces.Discrete(4)
    vec.reset()
    _, rewards, _, _ = vec.step(np.array([0, 3]))
    assert rewards.tolist() == [2.0, 5.0]  # Masked pays its action


def test_action_masks_come_as_sb3_contrib_asks_for_them():
    vec = make_sb3_vec(Masked, 2)
    plain = hurtle.make_vec(Masked, 2)
    vec.seed(0)
    vec.reset()
    _, infos = plain.reset(seed=0)
    assert vec.has_attr("action_masks")
    assert np.array_equal(vec.env_method("action_masks"), infos["action_mask"])
    vec.step(np.zeros(2, int))
    *_, infos = plain.step(np.full(2, 2))
    assert np.array_equal(vec.env_method("action_masks", indices=1), infos["action_mask"][1:])
    assert not make_sb3_vec("cartpole", 2).has_attr("action_masks")


def test_each_agent_is_a_row():
    vec, plain = make_sb3_vec(Crew, 2), hurtle.make_vec(Crew, 2)
    assert (vec.num_envs, vec.num_agents) == (6, 3)
    assert vec.observation_space == spaces.Box(-100.0, 100.0, (2,))
    assert vec.action_space == spaces.Discrete(3)
    vec.seed(0)
    assert np.array_equal(vec.reset(), plain.reset(seed=0)[0].reshape(6, 2))
    assert np.array(vec.env_method("action_masks")).shape == (6, 3)
    for step in range(1, 13):
        actions = np.array([0, 1, 0, 1, 0, 1])
        obs, rewards, dones, infos = vec.step(actions)
        plain_obs, plain_rewards, terminated, truncated, plain_infos = plain.step(actions.reshape(2, 3))
        assert np.array_equal(obs, plain_obs.reshape(6, 2))
        assert np.array_equal(rewards, plain_rewards.reshape(6))
        assert np.array_equal(dones, (terminated | truncated).reshape(6))
        for row in np.flatnonzero(dones):
            env, agent = divmod(row, 3)
            assert infos[row]["episode"]["r"] == plain_infos["episode"]["r"][env, agent]
            assert infos[row]["episode"]["l"] == plain_infos["episode"]["l"][env, agent]
            assert ("terminal_observation" in infos[row]) == (step == 9)  # closing time
            if step == 9:
                assert np.array_equal(infos[row]["terminal_observation"], plain_infos["final_obs"][env, agent])
    assert sb3.PPO("MlpPolicy", vec, n_steps=8, batch_size=24, device="cpu").learn(96).num_timesteps == 96


def test_agents_of_a_pettingzoo_env_are_rows():
    spread = pytest.importorskip("mpe2.simple_spread_v3", reason='needs pip install "hurtle[pettingzoo]"')
    vec = make_sb3_vec(spread.parallel_env, 2, backend="serial", max_cycles=4)
    single = spread.parallel_env(max_cycles=4)
    vec.seed(5)
    first = vec.reset()
    obs, _ = single.reset(seed=6)
    assert np.array_equal(first[3:], np.stack(list(obs.values())))
    total = np.zeros(3)
    for _ in range(4):
        _, rewards, dones, infos = vec.step(np.arange(6) % 5)
        obs, expected, *_ = single.step(dict(zip(single.agents, (3, 4, 0), strict=True)))
        assert rewards[3:] == pytest.approx(list(expected.values()))
        total += list(expected.values())
    assert dones.all()
    for info, last, returned in zip(infos[3:], obs.values(), total, strict=True):
        assert np.array_equal(info["terminal_observation"], last)
        assert info["TimeLimit.truncated"] is True
        assert (info["episode"]["r"], info["episode"]["l"]) == (pytest.approx(returned), 4)


@pytest.mark.parametrize("env", [Shift, "snake"])
def test_absent_agents_are_refused(env):
    vec = make_sb3_vec(env, 2)
    vec.reset()

    def play():
        for _ in range(200):
            vec.step(np.zeros(vec.num_envs, int))

    with pytest.raises(HurtleError, match=r"Agent \d of env \d is absent, and SB3 would train on its empty row"):
        play()


def test_what_sb3_cannot_use_is_refused():
    with pytest.raises(HurtleError, match=r"takes a vector env .* got a NativeEnv"):
        SB3VecEnv(hurtle.make("cartpole"))
    with pytest.raises(HurtleError, match=r"needs SAME_STEP autoreset, got AutoresetMode\.NEXT_STEP"):
        make_sb3_vec("cartpole", 2, autoreset_mode="NextStep")
    vec = hurtle.make_vec("cartpole", 2)
    vec.device = "cuda:0"
    with pytest.raises(HurtleError, match="make it with device='cpu'"):
        SB3VecEnv(vec)
    pool = hurtle.make_vec(Cart, 4, backend="serial", batch_size=2)
    with pytest.raises(HurtleError, match="is a pool; make it without batch_size"):
        SB3VecEnv(pool)


def test_a_missing_sb3_is_named_with_its_extra(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "stable_baselines3"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "hurtle.integrations.sb3")
    with pytest.raises(HurtleError, match=r'pip install "hurtle\[sb3\]"'):
        importlib.import_module("hurtle.integrations.sb3")


def test_pictures_are_tiled():
    vec = make_sb3_vec(Walk, 4, render_mode="rgb_array")
    vec.reset()
    assert vec.render().shape == (4, 22, 3)
    assert [picture.shape for picture in vec.env_method("render", indices=[1, 2])] == [(2, 11, 3)] * 2


def test_sb3s_own_wrappers_work_on_top():
    base = make_sb3_vec("cartpole", 4, **SHORT_CARTPOLE)
    with pytest.warns(UserWarning, match="statistics will be"):  # VecMonitor counts again what our infos hold
        monitored = VecMonitor(base)
    vec = VecNormalize(VecFrameStack(monitored, 2))
    model = sb3.PPO("MlpPolicy", vec, device="cpu", n_steps=64, batch_size=64)
    model.learn(512)
    assert vec.observation_space.shape == (8,)
    assert max(episode["l"] for episode in model.ep_info_buffer) == 14
    assert vec.obs_rms.count > 500


@pytest.mark.parametrize("algorithm", ["DQN", "A2C"])
def test_other_algorithms_take_it(algorithm):
    vec = make_sb3_vec("cartpole", 2, **SHORT_CARTPOLE)
    settings = {"learning_starts": 50, "buffer_size": 1000} if algorithm == "DQN" else {}
    model = getattr(sb3, algorithm)("MlpPolicy", vec, device="cpu", **settings).learn(400)
    assert model.num_timesteps >= 400
    if algorithm == "DQN":  # the replay buffer knows which ends were only ends of time
        ends, timeouts = model.replay_buffer.dones[:200], model.replay_buffer.timeouts[:200]
        assert timeouts.sum() > 0
        assert (ends >= timeouts).all()


def test_sac_takes_continuous_actions():
    vec = make_sb3_vec("pendulum", 2)
    model = sb3.SAC("MlpPolicy", vec, device="cpu", learning_starts=32, buffer_size=500, batch_size=32).learn(80)
    assert model.num_timesteps >= 80


@pytest.mark.slow
def test_ppo_learns_cartpole():
    vec = make_sb3_vec("cartpole", 8)
    model = sb3.PPO("MlpPolicy", vec, seed=0, device="cpu", **PPO_SETTINGS)
    model.learn(24_576)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no complaint about a missing Monitor
        mean, _ = evaluate_policy(model, vec, n_eval_episodes=16, deterministic=False)
    assert mean > 150


@pytest.mark.slow
@pytest.mark.parametrize("env", ["cartpole", "CartPole-v1"])
def test_ppo_solves_cartpole(env):
    vec = make_sb3_vec(env, 8)
    model = sb3.PPO("MlpPolicy", vec, seed=1, device="cpu", **PPO_SETTINGS)
    model.learn(60_000)
    mean, _ = evaluate_policy(model, vec, n_eval_episodes=24)
    vec.close()
    assert mean > 450
