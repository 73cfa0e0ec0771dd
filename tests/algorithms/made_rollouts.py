"""Rollouts filled by hand, for tests of the learners: no env is needed."""

import numpy as np
import torch
from gymnasium import spaces
from plain_ppo import Plain

from hurtle.buffers.rollout import Done, Finals, Rollout
from hurtle.policies.build import PolicyConfig, build_policy

OBS = spaces.Box(-10, 10, (3,), np.float32)
ACTIONS = spaces.Discrete(3)


class MadeRollout(Rollout):
    """A rollout with made-up bootstrap values, new for every update, so that no learner asks the policy for them."""

    always_done = Done.BOOTSTRAP

    @property
    def done(self):
        return self.always_done

    @done.setter
    def done(self, value):
        pass


def plain_policy(seed=0):
    """A policy around the reference network."""
    return build_policy(PolicyConfig(), OBS, ACTIONS, module=Plain(seed))


def fill(rollout, policy, seed=0, invalid=0.0, noise=0.3, ends=0.1):
    """Random steps, as a slightly different policy would have taken them."""
    rng = np.random.default_rng(seed)
    steps, rows = rollout.num_steps, rollout.num_rows

    def normal(*shape):
        return torch.from_numpy(rng.normal(size=shape).astype(np.float32))

    def chance(p, *shape):
        return torch.from_numpy(rng.random(shape) < p)

    rollout.obs.copy_(normal(*rollout.obs.shape))
    if policy.normalizer is not None:
        rollout.inputs.copy_(policy.normalizer.normalize(rollout.obs))
    rollout.starts.copy_(chance(ends, steps, rows))
    if rollout.masks is not None:
        rollout.masks.copy_(chance(0.6, *rollout.masks.shape))
        rollout.masks[..., 0] = True
    for part in rollout.initial_state:
        part.copy_(0.5 * normal(*part.shape))
    rollout.rewards.copy_(normal(steps, rows))
    rollout.terminated.copy_(chance(ends, steps, rows))
    rollout.truncated.copy_(chance(ends, steps, rows))
    rollout.final_values.copy_(normal(steps, rows))
    rollout.last_values.copy_(normal(rows))
    rollout.valid.copy_(~chance(invalid, steps, rows))
    rollout.all_valid = bool(rollout.valid.all())
    with torch.no_grad():
        distribution, values, _ = policy.forward_sequence(rollout.inputs, rollout.initial_state, rollout.starts, rollout.masks)
        uniforms = torch.from_numpy(rng.random((steps * rows, policy.num_uniforms), np.float32))
        actions = distribution.sample(uniforms)
        rollout.actions.copy_(actions.view_as(rollout.actions))
        rollout.log_probs.copy_(distribution.log_prob(actions).view(steps, rows) + noise * normal(steps, rows))
        rollout.values.copy_(values.view(steps, rows) + noise * normal(steps, rows))
    return rollout


def made(policy, steps=16, rows=6, seed=0, has_masks=False, **how):
    """A filled rollout for this policy."""
    return fill(MadeRollout(policy, steps, rows, has_masks), policy, seed, **how)


def collected(policy, steps=16, rows=6, **how):
    """A made-up rollout, as a collector leaves it: with final observations, but without the values of what follows."""
    rollout = made(policy, steps, rows, **how)
    rollout.__class__ = Rollout
    rollout.done = Done.NOTHING
    generator = torch.Generator().manual_seed(0)
    cut, row = (rollout.truncated & ~rollout.terminated).nonzero(as_tuple=True)

    def observations(count):
        return torch.randn(count, *rollout.obs.shape[2:], generator=generator).to(rollout.obs.dtype)

    state = tuple(torch.randn(len(cut), part.shape[1], generator=generator) for part in rollout.initial_state)
    rollout.finals = Finals(cut, row, observations(len(cut)), state)
    rollout.last_obs.copy_(observations(rows))
    return rollout


def arrays(rollout):
    """Its fields as float64 and bool arrays, for the reference."""
    names = ("rewards", "values", "terminated", "truncated", "final_values", "last_values")
    fields = [getattr(rollout, name).numpy() for name in names]
    return [field if field.dtype == bool else field.astype(np.float64) for field in fields]


def parameters(policy):
    """A copy of all parameters, by name."""
    return {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
