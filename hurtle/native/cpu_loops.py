"""The CPU entry points of a generated module: loops over a range of envs.

In compiled code every argument is an int64, arrays are addresses, and `env_calls.py` makes the calls, with the GIL released.
Its text is pasted into every generated CPU module (see generate.py).
"""

from hurtle.native.core import publish, reset_env
from hurtle.native.pasted import (
    action_is_legal,
    actions_at,
    advance_env,
    entry,
    flags_at,
    sample_action,
    seeds_at,
    unpack,
    zero_obs,
)


@entry
def reset_envs(handle, chosen, lo, hi):
    """Begin a new episode in the chosen envs of [lo, hi)."""
    arrays, chosen = unpack(handle), flags_at(chosen, hi)
    for i in range(lo, hi):
        if chosen[i]:
            env = arrays.envs[i]
            reset_env(i, env, arrays)
            zero_obs(arrays.obs[i])
            publish(i, env, arrays.obs[i], arrays)
    return 0


@entry
def first_illegal(actions, lo, hi):
    """The first env of [lo, hi) whose action is illegal; -1 if there is none."""
    actions, illegal = actions_at(actions, hi), 0
    for i in range(lo, hi):
        illegal += not action_is_legal(actions[i])
    if illegal:
        for i in range(lo, hi):
            if not action_is_legal(actions[i]):
                return i
    return -1


@entry
def step_envs(handle, actions, same_step, lo, hi):
    """Step envs [lo, hi); returns the number of episodes that ended."""
    arrays, actions, ended = unpack(handle), actions_at(actions, hi), 0
    for i in range(lo, hi):
        env = arrays.envs[i]
        ended += advance_env(i, env, actions[i], same_step != 0, arrays)
        zero_obs(arrays.obs[i])
        publish(i, env, arrays.obs[i], arrays)
    return ended


@entry
def play_envs(handle, actions, seeds, first_step, num_steps, lo, hi):
    """Take `num_steps` uniformly random actions in envs [lo, hi); returns the number of episodes that ended."""
    arrays, actions, seeds, ended = unpack(handle), actions_at(actions, hi), seeds_at(seeds, hi), 0
    for t in range(first_step, first_step + num_steps):
        for i in range(lo, hi):
            env = arrays.envs[i]
            sample_action(seeds[i], t, actions, i)
            ended += advance_env(i, env, actions[i], True, arrays)
            zero_obs(arrays.obs[i])
            publish(i, env, arrays.obs[i], arrays)
    return ended
