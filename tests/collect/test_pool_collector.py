"""`PoolCollector`: envs return in any order, at any pace; no step is lost, duplicated or misplaced."""

from functools import partial

import numpy as np
import pytest
import torch
from env_replay import Replay, check_statistics
from fake_gpu import FakeGpu
from gymnasium.vector import AutoresetMode
from scripted_envs import Script, Walk, collector_of, sharp_policy

import hurtle
from hurtle.algorithms.ppo import evaluate_actions
from hurtle.buffers.rollout import FIELDS
from hurtle.collect import pool_collector as pool
from hurtle.collect.inference import Actor
from hurtle.collect.pool_collector import double_buffered_batch
from hurtle.collect.transfer import Staging

SAME, NEXT = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP


class OddPool:
    """A pool whose envs return at random, env i with probability `speeds[i]`. It steps its own serial vector."""

    num_agents = 1

    def __init__(self, speeds, batch_size, mode, seed=0, masks=False):
        self.num_envs, self.batch_size = len(speeds), batch_size
        self.metadata = {"autoreset_mode": mode}
        self.speeds, self.rng = np.array(speeds, float), np.random.default_rng(seed)
        vecs = [
            hurtle.make_vec(partial(Script, masks=masks), 1, backend="serial", autoreset_mode=mode, copy=True) for _ in speeds
        ]
        self.vecs, self.waiting = vecs, {}
        self.single_observation_space, self.single_action_space = vecs[0].single_observation_space, vecs[0].single_action_space

    def reset(self, *, seed):
        for i, vec in enumerate(self.vecs):
            obs, infos = vec.reset(seed=seed + i)
            self.waiting[i] = obs, np.zeros(1), np.zeros(1, bool), np.zeros(1, bool), infos
        obs, *_, infos = self.recv()
        return obs, infos

    def recv(self):
        ready = np.array(list(self.waiting))
        chance = self.speeds[ready] / self.speeds[ready].sum()
        ids = np.sort(self.rng.choice(ready, self.batch_size, replace=False, p=chance))
        parts = [self.waiting.pop(int(i)) for i in ids]
        infos = {"env_id": ids}
        for k, (*_, own) in enumerate(parts):
            for name in ("final_obs", "_final_obs", "_episode", "action_mask"):
                if name in own:
                    infos.setdefault(name, np.zeros((len(ids), *own[name].shape[1:]), own[name].dtype))[k] = own[name][0]
            if "episode" in own:
                episode = infos.setdefault("episode", {"r": np.zeros(len(ids)), "l": np.zeros(len(ids), int)})
                for name in episode:
                    episode[name][k] = own["episode"][name][0]
        return (*(np.concatenate(part) for part in list(zip(*parts, strict=True))[:4]), infos)

    def send(self, actions, env_id):
        for action, i in zip(actions, env_id, strict=True):
            assert int(i) not in self.waiting
            self.waiting[int(i)] = self.vecs[int(i)].step(action[None])

    def close(self):
        for vec in self.vecs:
            vec.close()


def followed(vec, make_env, policy, mode, num_steps, rollouts, seed=3, env_of=None, masks=False):
    """Collect, and check every segment as the next piece of its env's trajectory; returns segment counts per env."""
    collector, rollout = collector_of(vec, policy, num_steps, seed=seed)
    assert collector.has_masks == masks
    replays = [Replay(make_env(), seed + i, policy, mode is NEXT) for i in range(vec.num_envs)]
    counts, stats = np.zeros((rollouts, vec.num_envs), int), []
    for r in range(rollouts):
        stats.append(collector.collect(rollout))
        for n in range(vec.num_envs):
            env = env_of(rollout, n) if env_of else round(float(rollout.obs[0, n, 0]) * 10) - seed
            replays[env].check(rollout, n)
            counts[r, env] += 1
        assert rollout.all_valid == bool(rollout.valid.all())
        assert collector.has_masks == masks
    collector.close()
    return counts, stats, replays


@pytest.mark.parametrize(
    ("mode", "recurrent"),
    [
        (SAME, "lstm"),
        (NEXT, "none"),
        pytest.param(SAME, "none", marks=pytest.mark.slow),
        pytest.param(NEXT, "lstm", marks=pytest.mark.slow),
    ],
)
def test_odd_orders_and_speeds(mode, recurrent):
    """One env is twenty times slower than another: the fast ones fill several segments, the slow one's is carried over."""
    vec = OddPool([6, 1, 0.3, 2, 3, 0.5], 2, mode)
    policy = sharp_policy(vec.single_observation_space, vec.single_action_space, recurrent)
    counts, _, _ = followed(vec, Script, policy, mode, 3, 8)
    assert counts[0].max() > 1  # several in one rollout
    assert 0 in counts[:, 2]  # a rollout without the slow one
    assert counts[:, 2].sum() > 0  # its segment arrived eventually
    assert counts.sum() == 8 * 6


@pytest.mark.parametrize(
    ("num_steps", "batch_size"),
    [
        *((1, 1), (1, 6), (2, 3), (2, 6), (5, 3)),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(1, 3), (2, 1), (5, 1), (5, 6)]),
    ],
)
def test_batches_and_segments_of_all_sizes(batch_size, num_steps):
    vec = OddPool([1, 2, 3, 4, 5, 6, 7], batch_size, SAME, seed=batch_size)
    policy = sharp_policy(vec.single_observation_space, vec.single_action_space)
    followed(vec, Script, policy, SAME, num_steps, 5)


def test_masks_of_a_pool():
    vec = OddPool([3, 1, 2], 2, SAME, masks=True)
    policy = sharp_policy(vec.single_observation_space, vec.single_action_space, "gru")
    followed(vec, lambda: Script(masks=True), policy, SAME, 5, 6, masks=True)


def test_episodes_are_reported_once():
    """All episodes that ended up to the last returned step of each env, no more and no less."""
    vec = OddPool([3, 1, 2], 1, SAME)
    policy = sharp_policy(vec.single_observation_space, vec.single_action_space)
    collector, rollout = collector_of(vec, policy, 5, seed=3)
    found = [collector.collect(rollout) for _ in range(10)]
    lengths = np.concatenate([stats.lengths for stats in found])
    whole = sum(len(stats.returns) for stats in found)
    ended = sum(script.slots[0].env.episode for script in (v._shard for v in vec.vecs))
    under_way = sum("episode" in waiting[-1] for waiting in vec.waiting.values())
    assert whole == len(lengths) == ended - under_way
    collector.close()


@pytest.mark.parametrize("recurrent", [pytest.param("none", marks=pytest.mark.slow), "gru"])
def test_native_pool(recurrent):
    vec = hurtle.make_vec(Walk, 6, batch_size=2)
    policy = sharp_policy(vec.single_observation_space, vec.single_action_space, recurrent)
    turn = iter(range(1000))
    _, stats, replays = followed(vec, lambda: hurtle.make(Walk), policy, SAME, 4, 6, env_of=lambda rollout, n: next(turn) % 6)
    assert sum(len(found.returns) for found in stats) >= sum(len(replay.episodes) for replay in replays)


def test_a_pool_of_processes():
    slow = {4: 0.1}
    maker = partial(Script, seconds=0.001, slow=slow)
    vec = hurtle.make_vec(maker, 4, backend="process", num_workers=2, batch_size=2)
    policy = sharp_policy(vec.single_observation_space, vec.single_action_space, "lstm")
    counts, _, _ = followed(vec, Script, policy, SAME, 4, 8)
    assert counts[:, 1].sum() < counts.sum() / 4  # the slow one


@pytest.mark.parametrize("recurrent", ["none", "lstm", "gru", "mingru"])
def test_the_update_sees_the_log_probs_of_the_collection(recurrent):
    vec = OddPool([5, 1, 0.5, 2], 2, SAME)
    policy = sharp_policy(vec.single_observation_space, vec.single_action_space, recurrent)
    collector, rollout = collector_of(vec, policy, 8)
    for _ in range(4):
        collector.collect(rollout)
        batch = rollout.segments(torch.tensor([2, 0, 3, 1]))
        log_probs, _, values = evaluate_actions(policy, batch)
        torch.testing.assert_close(log_probs, batch.log_probs, rtol=0, atol=1e-5)
        torch.testing.assert_close(values, batch.values, rtol=0, atol=1e-5)
    collector.close()


def test_rewards_and_observations_of_a_pool_are_normalized():
    """Segment by segment, in the order in which they were handed over; a row's running return continues in its next segment."""
    vec = OddPool([5, 1, 0.5, 2], 2, SAME)
    policy = sharp_policy(vec.single_observation_space, vec.single_action_space, normalize=True)
    collector, rollout = collector_of(vec, policy, 4, mode="normalize")
    running, returns, seen = np.zeros(4), [], []
    lives = {env: iter(life(env)) for env in range(4)}
    envs_of = []
    for _ in range(5):
        std = np.sqrt(np.var(returns) + 1e-8) if returns else 1.0
        collector.collect(rollout)
        envs_of.append(rollout.columns)
        for n, env in enumerate(rollout.columns.tolist()):
            for t in range(4):
                obs, reward, over = next(lives[env])
                reward += 0.01 * int(rollout.actions[t, n])
                seen.append(obs)
                assert float(rollout.rewards[t, n]) == pytest.approx(reward, rel=1e-6)
                assert float(rollout.scaled_rewards[t, n]) == pytest.approx(np.clip(reward / std, -10, 10), rel=1e-5)
                np.testing.assert_array_equal(rollout.obs[t, n], obs)  # raw, exactly
                running[env] = 0.9 * running[env] + reward
                returns.append(running[env])
                running[env] *= not over
        np.testing.assert_allclose(policy.normalizer.mean, np.mean(seen, 0), atol=1e-12)
        np.testing.assert_allclose(policy.normalizer.variance, np.var(seen, 0), atol=1e-12)
    assert max(len(rows) - len(set(rows.tolist())) for rows in envs_of) > 0  # a row had several segments
    collector.close()


def life(seed):
    """(observation, reward without its action's part, whether the episode ends) of each step of a `Script`."""
    env = Script()
    obs, _ = env.reset(seed=seed)
    while True:
        after, reward, terminated, truncated, _ = env.step(0)
        yield np.array(obs), reward, terminated or truncated
        obs = env.reset()[0] if terminated or truncated else after


@pytest.mark.parametrize("kind", ["serial", "native"])
def test_a_pool_resumes_with_new_seeds(kind):
    def parts():
        if kind == "native":
            vec = hurtle.make_vec(Walk, 4, batch_size=2)
        else:
            vec = hurtle.make_vec(Script, 4, backend="serial", batch_size=2)
        policy = sharp_policy(vec.single_observation_space, vec.single_action_space)
        return collector_of(vec, policy, 6, seed=2)

    collector, rollout = parts()
    collector.collect(rollout)
    other, other_rollout = parts()
    other.load_state_dict(collector.state_dict())
    assert other.steps >= collector.steps > 0
    other.collect(other_rollout)
    first = other_rollout.starts[0]
    assert bool(first[:2].all())
    if kind == "serial":
        used = {round(10 * value) for value in rollout.obs[..., 0].flatten().tolist()}
        new = {round(10 * value) for value in other_rollout.obs[..., 0].flatten().tolist()}
        assert not used & new
    collector.close()
    other.close()


def test_stopping_a_pool():
    vec = OddPool([1, 1, 1], 2, SAME)
    policy = sharp_policy(vec.single_observation_space, vec.single_action_space)
    collector, rollout = collector_of(vec, policy, 4, seed=3)
    replays = [Replay(Script(), 3 + i, policy) for i in range(3)]
    collector.request_stop()
    assert collector.collect(rollout) is None
    for _ in range(3):
        assert collector.collect(rollout) is not None
        for n in range(3):
            replays[round(float(rollout.obs[0, n, 0]) * 10) - 3].check(rollout, n)
    collector.close()


def test_statistics_of_a_fair_pool():
    """With one batch and equal speeds the result is known: all episodes of the segments handed over."""
    vec = hurtle.make_vec(Script, 4, backend="serial", batch_size=2, order="fair")
    policy = sharp_policy(vec.single_observation_space, vec.single_action_space)
    counts, stats, replays = followed(vec, Script, policy, SAME, 12, 1)
    assert counts.tolist() == [[1, 1, 1, 1]]
    check_statistics(stats, replays)


@pytest.mark.parametrize(
    ("mode", "recurrent"),
    [
        (SAME, "none"),
        (NEXT, "lstm"),
        pytest.param(SAME, "lstm", marks=pytest.mark.slow),
        pytest.param(NEXT, "none", marks=pytest.mark.slow),
    ],
)
def test_a_gpu_in_between_changes_no_bit(mode, recurrent):
    found = []
    for gpu in (None, FakeGpu(late_uploads=False)):
        vec = OddPool([6, 1, 0.3, 2, 3, 0.5], 2, mode, masks=True)
        policy = sharp_policy(vec.single_observation_space, vec.single_action_space, recurrent, normalize=True)
        collector, rollout = collector_of(vec, policy, 4, mode="normalize", seed=3)
        if gpu is not None:
            collector.collector.actor = Actor(policy, 6, 3, staging=Staging("cpu", gpu))
        for _ in range(5):
            collector.collect(rollout)
            fields = {name: getattr(rollout, name).clone() for name in (*FIELDS, "last_obs", "last_starts", "scaled_rewards")}
            fields |= {f"state {k}": part.clone() for k, part in enumerate(rollout.initial_state)}
            found.append({**fields, "all valid": rollout.all_valid, "mean": policy.normalizer.mean.clone()})
        collector.close()
    for expected, staged in zip(found[:5], found[5:], strict=True):
        for name, value in expected.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(staged[name])), name


def test_a_batch_is_sent_as_soon_as_its_actions_are_there():
    """Before the next batch is requested, with one wait, and before the policy's other outputs are stored."""
    vec, gpu = OddPool([1, 1, 1, 1], 2, SAME), FakeGpu(late_uploads=False)
    policy = sharp_policy(vec.single_observation_space, vec.single_action_space)
    collector, rollout = collector_of(vec, policy, 3)
    collector.collector.actor = Actor(policy, 4, 0, staging=Staging("cpu", gpu))

    def noted(owner, name):
        inner = getattr(owner, name)

        def call(*given):
            gpu.log.append(name)
            return inner(*given)

        setattr(owner, name, call)

    for owner, name in ((vec, "recv"), (vec, "send"), (collector.collector, "_write")):
        noted(owner, name)
    for _ in range(3):
        collector.collect(rollout)
    batches = " ".join(gpu.log).split("recv")
    assert len(batches) > 15
    for batch in batches:
        words = batch.split()
        written = words.index("_write")
        assert words[written - 3 : written] == ["download", "wait", "send"], batch
        assert set(words[: written - 3] + words[written + 1 :]) == {"upload"}, batch


class Seer(torch.nn.Module):
    """Its value is a view of its input."""

    def __init__(self):
        super().__init__()
        self.actor = torch.nn.Linear(2, 3)

    def encode(self, obs):
        return obs

    def decode(self, features):
        return torch.distributions.Categorical(logits=self.actor(features)), features[:, :1]


def test_values_are_those_of_what_was_seen_when_the_env_writes_over_it():
    vec = hurtle.make_vec(Walk, 4, batch_size=2)  # native envs step in `send`, in memory that the policy saw
    policy = sharp_policy(vec.single_observation_space, vec.single_action_space)
    policy.network = Seer()
    collector, rollout = collector_of(vec, policy, 5)
    for _ in range(3):
        collector.collect(rollout)
        assert torch.equal(rollout.values, rollout.obs[..., 0])
    assert rollout.values.unique().numel() > 2
    collector.close()


def test_which_pools_are_double_buffered(monkeypatch):
    monkeypatch.setattr(pool, "free_cores", lambda: 8)
    assert double_buffered_batch(16, 4, "process", "cuda") == 8
    assert double_buffered_batch(16, None, "process", torch.device("cuda", 1)) == 8
    assert double_buffered_batch(6, 3, "process", "cuda:0") == 3
    assert double_buffered_batch(14, None, "process", "cuda") is None  # eight workers: some would have one env
    assert double_buffered_batch(4, None, "process", "cuda") is None  # four workers with one each
    assert double_buffered_batch(15, 2, "process", "cuda") is None  # cannot be halved
    assert double_buffered_batch(16, 4, "process", "cpu") is None
    for backend in ("serial", "native", "ray", "auto"):
        assert double_buffered_batch(16, 4, backend, "cuda") is None
