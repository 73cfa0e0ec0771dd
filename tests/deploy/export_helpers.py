"""Tiny trained runs for every kind of spaces and networks, and what an exported policy is compared with."""

import copy

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from hand_made_runs import policy_for, write_run
from torch import nn
from torch.distributions import Categorical, Independent, Normal

import hurtle
from hurtle.policies.distributions import Beta, Gaussian
from hurtle.policies.numpy_acting import choose, see

TOLERANCE = 1e-5
QUICK = {"num_envs": 2, "num_steps": 8, "eval_episodes": 2, "total_steps": 32, "learning_rate": 0.03, "backend": "serial"}
QUIET = {"progress": "quiet", "trackers": (), "preset": False}

OBSERVATIONS = {
    "float32": spaces.Box(-np.inf, np.inf, (5,), np.float32),
    "float64": spaces.Box(-2.0, 2.0, (3,), np.float64),
    "uint8": spaces.Box(0, 255, (6,), np.uint8),
    "int8": spaces.Box(-5, 5, (4,), np.int8),
    "matrix": spaces.Box(-1.0, 1.0, (3, 2), np.float32),
    "discrete": spaces.Discrete(5, start=2),
    "multi_discrete": spaces.MultiDiscrete([3, 4], start=[1, -1]),
    "multi_binary": spaces.MultiBinary(5),
    "grid": spaces.Box(0, 1, (6, 5, 2), np.uint8),
    "image": spaces.Box(0, 255, (36, 36, 1), np.uint8),
    "floats": spaces.Dict(b=spaces.Box(-1, 1, (2,), np.float32), a=spaces.Tuple([spaces.Box(0, 3, (), np.float32)])),
    "single": spaces.Dict(only=spaces.Box(-1, 1, (2, 2), np.float32)),
    "mixed": spaces.Dict(
        bag=spaces.Dict(items=spaces.Box(0, 9, (3,), np.int64), gold=spaces.Discrete(7, start=1)),
        map=spaces.Box(0, 255, (3, 3), np.uint8),
        pose=spaces.Tuple([spaces.Box(-1, 1, (2,), np.float64), spaces.MultiBinary(3)]),
    ),
    "text": spaces.Dict(word=spaces.Text(6), words=spaces.Sequence(spaces.Box(-1, 1, (2,), np.float32))),
}
ACTIONS = {
    "discrete": (spaces.Discrete(4, start=-1), "auto"),
    "multi_discrete": (spaces.MultiDiscrete([3, 2, 4], start=[1, 0, -2]), "auto"),
    "multi_binary": (spaces.MultiBinary(3), "auto"),
    "gaussian": (spaces.Box(-0.05, 0.05, (2,), np.float32), "auto"),
    "float64": (spaces.Box(-1.0, 2.0, (1,), np.float64), "auto"),
    "integer": (spaces.Box(-2, 3, (2,), np.int32), "auto"),
    "squashed": (spaces.Box(np.float32([-2, 0]), np.float32([2, 3])), "squashed_gaussian"),
    "beta": (spaces.Box(-1.0, 4.0, (2, 1), np.float32), "beta"),
    "structured": (spaces.Dict(move=spaces.Discrete(3, start=-1), use=spaces.MultiDiscrete([2, 3])), "auto"),
}
NETWORKS = {
    "tanh": {"policy": "mlp", "hidden_sizes": (16, 8)},
    "relu": {"policy": "mlp", "hidden_sizes": (33, 7), "activation": "relu"},
    "shared": {"policy": "mlp", "hidden_sizes": (16,), "separate_networks": False},
    "deep": {"policy": "mlp", "hidden_sizes": (8, 9, 10, 11)},
    "linear": {"policy": "mlp", "hidden_sizes": ()},
    "normalized": {"policy": "mlp", "hidden_sizes": (16,), "normalize_observations": True},
    "cnn": {},
    "structured": {"policy": "structured", "hidden_sizes": (16,)},
    "lstm": {"recurrent": "lstm", "hidden_sizes": (16,)},
    "gru": {"recurrent": "gru", "hidden_sizes": (16,)},
    "mingru": {"recurrent": "mingru", "hidden_sizes": (16,)},
    "module": {},
}
MASKABLE = ("discrete", "multi_discrete", "multi_binary")
STRUCTURED = ("floats", "single", "mixed", "text")


def fits(network, observation):
    """Whether a network can see such observations."""
    if network == "normalized":
        return observation in ("float32", "float64", "matrix", "floats", "single")
    if network == "cnn":
        return observation in ("grid", "image")
    if network == "structured":
        return observation in STRUCTURED
    if network in ("lstm", "gru", "mingru"):
        return True
    if network == "module":
        return observation not in STRUCTURED
    return observation not in ("mixed", "text")  # bytes of several dtypes mean nothing to an MLP


class Random(gymnasium.Env):
    """Observations and rewards are drawn at random, and some actions are illegal if it has masks."""

    def __init__(self, observation_space, action_space, masks=False):
        self.observation_space, self.action_space = copy.deepcopy(observation_space), copy.deepcopy(action_space)
        self.masks = masks

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps = 0
        return sample(self.observation_space), self._info()

    def step(self, action):
        assert self.action_space.contains(action), action
        self.steps += 1
        return sample(self.observation_space), float(self.np_random.normal()), self.steps == 6, False, self._info()

    def _info(self):
        if not self.masks:
            return {}
        mask = mask_rows(self.action_space, 1, self.np_random)[0]
        return {"action_mask": mask.astype(np.int8)}


def random_env(observation_space, action_space, masks=False):
    """A maker of such envs, whose Sequences have at most 3 entries."""

    def make_random():
        env = Random(observation_space, action_space, masks)
        return hurtle.emulate(env, max_length=3) if has_sequence(observation_space) else env

    return make_random


def has_sequence(space):
    return isinstance(space, spaces.Dict) and any(isinstance(child, spaces.Sequence) for child in space.spaces.values())


def sample(space):
    """A value of a space; Sequences have at most 3 entries."""
    found = space.sample()
    if has_sequence(space):
        found = {key: value[:3] if isinstance(space[key], spaces.Sequence) else value for key, value in found.items()}
    return found


def mask_rows(action_space, count, rng):
    """Masks [count, n] that leave at least one action of each choice."""
    nvec = [action_space.n] if isinstance(action_space, spaces.Discrete) else None
    if nvec is None:
        nvec = action_space.nvec if isinstance(action_space, spaces.MultiDiscrete) else [2] * action_space.n
    parts = []
    for options in nvec:
        part = rng.random((count, options)) < 0.5
        part[np.arange(count), rng.integers(0, options, count)] = True
        parts.append(part)
    return np.concatenate(parts, 1)


class Own(nn.Module):
    """A user's own network, with torch's own distributions."""

    def __init__(self, observation_space, action_space):
        super().__init__()
        size = int(np.prod(observation_space.shape or (1,)))
        self.body = nn.Sequential(nn.Linear(size, 12), nn.LayerNorm(12), nn.SiLU())
        self.is_box = isinstance(action_space, spaces.Box)
        outputs = int(np.prod(action_space.shape)) if self.is_box else int(action_space.n)
        self.actor, self.critic = nn.Linear(12, outputs), nn.Linear(12, 1)

    def encode(self, obs):
        return self.body(obs.float().reshape(obs.shape[0], -1))

    def decode(self, features):
        outputs, value = self.actor(features), self.critic(features)
        if self.is_box:
            return Independent(Normal(outputs, torch.full_like(outputs, 0.5)), 1), value
        return Categorical(logits=outputs), value


def own_module(observation_space, action_space):
    """With weights from a seed of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return Own(observation_space, action_space)


def train_tiny(runs, env, **settings):
    """A run of two updates."""
    if settings.get("algorithm", "ppo") == "ppo":
        settings = {"minibatch_size": 8, "num_epochs": 2, **settings}
    return hurtle.train(env, **{**QUICK, **QUIET, "runs": str(runs), **settings})


def fresh_observations(policy, count, seed=2024):
    """Observations that no export was checked with, one by one."""
    space = copy.deepcopy(policy.observation_space)
    space.seed(seed)
    return [sample(space) for _ in range(count)]


def stacked(observations):
    """Plain observations as a batch; structured ones as a dict or tuple of batches."""
    first = observations[0]
    if isinstance(first, dict):
        return {key: stacked([obs[key] for obs in observations]) for key in first}
    if isinstance(first, tuple):
        return tuple(stacked([obs[k] for obs in observations]) for k in range(len(first)))
    return np.stack([np.asarray(obs) for obs in observations])


def expected_outputs(torch_policy, rows, state=(), mask=None):
    """Every output by name, from the torch policy itself."""
    with torch.inference_mode():
        module = torch_policy.module
        seen = see(module, rows, torch.device("cpu"))
        distribution, value, after = module(seen, state, None if mask is None else torch.from_numpy(mask))
    found = {"value": value, **{f"state_out_{k}": part for k, part in enumerate(after)}}
    if isinstance(distribution, Gaussian):
        found |= {"mean": distribution.mean, "log_std": distribution.log_std.expand_as(distribution.mean)}
    elif isinstance(distribution, Beta):
        found |= {"alpha": distribution.alpha, "beta": distribution.beta}
    else:
        found["logits"] = distribution.flat_log_probs()
    return {name: part.detach().float().numpy() for name, part in found.items()}


def assert_outputs_equal(found, expected):
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


def assert_actions_equal(found, expected, outputs, space):
    """Equal, but where the two best choices are as likely as each other; numbers of a Box to 1e-5.

    Returns:
        bool [B]: where no choice is so close.
    """
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    if isinstance(space, spaces.Box):
        np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
        return np.ones(len(found), bool)
    nvec = [space.n] if isinstance(space, spaces.Discrete) else np.ravel(getattr(space, "nvec", [2] * found[0].size))
    parts = np.split(outputs["logits"], np.cumsum(nvec)[:-1], 1)
    clear = np.stack([np.diff(np.sort(part, 1)[:, -2:], axis=1).max(1, initial=0.0) > TOLERANCE for part in parts], 1)
    np.testing.assert_array_equal(found.reshape(len(found), -1)[clear], expected.reshape(len(found), -1)[clear])
    return clear.all(1)


def assert_agrees(exported, reference, steps=1, count=40, seed=2024):
    """An exported policy does what the torch policy of the run does, row by row and one by one, on observations of its own."""
    module, rng = reference.module, np.random.default_rng(seed)
    observations = fresh_observations(reference, count, seed)
    rows = np.concatenate([reference._rows(obs)[0] for obs in observations])
    own, theirs, never = exported.initial_state(count), reference.initial_state(count), np.zeros(count, bool)
    for step in range(steps):
        mask = mask_rows(module.action_space, count, rng) if exported.card.masked else None
        expected, _ = choose(module, rows, theirs, mask, None, None, torch.device("cpu"))
        outputs = expected_outputs(reference, rows, theirs, mask)
        if exported.runtime != "native":
            feeds = exported.outputs(rows, state=own, mask=mask)
            assert_outputs_equal(feeds, {name: array for name, array in outputs.items() if name in feeds})
        found, own = exported.for_rows().choose_rows(rows, own, mask, never)
        clear = assert_actions_equal(found, expected, outputs, module.action_space)
        assert clear.mean() > 0.9
        if step == 0:
            _assert_single_actions_agree(exported, reference, observations, mask, clear)
        _, theirs = choose(module, rows, theirs, mask, None, None, torch.device("cpu"))
        rows = rows[rng.permutation(count)]


def _assert_single_actions_agree(exported, reference, observations, mask, clear):
    for k in np.flatnonzero(clear)[:5]:
        exported.reset()
        reference.reset()
        legal = None if mask is None else mask[k]
        found, expected = (policy.act(observations[k], mask=legal) for policy in (exported, reference))
        assert exported.action_space.contains(found)
        assert type(found) is type(expected)
        if isinstance(found, np.ndarray) and found.dtype.kind == "f":
            np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
        else:
            assert str(found) == str(expected)
    exported.reset()
    reference.reset()


def scramble(policy, seed=0):
    """The same policy with weights that prefer something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return policy


def hand_made(folder, observation="float32", action="discrete", **options):
    """A run with scrambled weights that was never trained, which is quick to make."""
    action_space, distribution = ACTIONS[action] if isinstance(action, str) else action
    env = random_env(OBSERVATIONS[observation], action_space)
    words = {"distribution": distribution, "hidden_sizes": (16, 8), **options}
    emulate = observation in STRUCTURED or action == "structured"
    policy = scramble(policy_for(env, emulate=emulate, **words)[0])
    return write_run(folder, env, weights_of=policy, emulate=emulate, **words)[0]
