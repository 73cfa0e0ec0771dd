"""Run folders with known policies in them, made without training; several test files use them."""

import torch
from torch import nn
from torch.distributions import Categorical

from hurtle.policies.build import build_policy
from hurtle.runners.assembly import describe_spaces, structured_actions
from hurtle.runners.settings import make_settings, settings_to_dict
from hurtle.tracking.checkpoints import Checkpoints
from hurtle.tracking.run_folder import RunFolder
from hurtle.trust import signed
from hurtle.vector.factory import make_vec


class Fixed(nn.Module):
    """A network with the same logits whatever it sees."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits, dtype=torch.float32))

    def encode(self, obs):
        return obs.flatten(1).float()

    def decode(self, features):
        return Categorical(logits=self.logits.expand(len(features), -1)), features.sum(1)


def policy_for(env, module=None, emulate=False, parameters=None, **overrides):
    """A policy for an env, its settings and its spaces as a checkpoint has them."""
    parameters = parameters or {}
    settings = make_settings(env if isinstance(env, str) else None, {"env": "object", "preset": False, **overrides})
    with make_vec(env, 1, backend="auto" if isinstance(env, str) else "serial", emulate=emulate, **parameters) as vec:
        described = describe_spaces(vec, structured_actions(env, parameters) if emulate else None)
        policy = build_policy(
            settings.policy,
            vec.agent_observation_space,
            vec.agent_action_space,
            layout=vec.layout if emulate else None,
            normalize_observations=settings.train.normalize_observations,
            module=module,
        )
    return policy, settings, described


def write_run(parent, env, module=None, steps=100, best=False, weights_of=None, parameters=None, own=True, **options):
    """A run folder with one checkpoint, signed by this user if it is `own`; returns the folder and the policy in it."""
    overrides = options if not parameters else {**options, "env_parameters": parameters}
    built, settings, described = policy_for(env, module, parameters=parameters, **overrides)
    policy = weights_of or built
    words = signed(settings_to_dict(settings)) if own else settings_to_dict(settings)
    state = {
        "settings": words,
        "spaces": described,
        "named_env": isinstance(env, str),
        "named_policy": module is None,
        "policy": policy.state_dict(),
        "progress": {"steps": steps},
    }
    folder = RunFolder.create(parent, settings.train.env)
    folder.write_config(words)
    Checkpoints(folder.checkpoints).save(steps, state, best=best)
    return folder.path, policy
