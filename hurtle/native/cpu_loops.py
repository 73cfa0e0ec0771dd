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

RESET, NEXT_STEP, SAME_STEP, PLAY = range(4)  # what `run_envs` does; after NEXT_STEP, ended envs are reset by the next one


@entry
def run_envs(mode, handle, given, seeds, first_step, last_step, lo, hi):
    """Reset the envs of [lo, hi) that `given` flags, or step all of them with its actions; returns the episodes that ended.

    PLAY writes random actions into `given` before each of the steps [first_step, last_step); other modes take one. It is one
    function because reset, step and observe are part of all modes: it compiles in half the time.
    """
    arrays, chosen, actions, seeds, ended = unpack(handle), flags_at(given, hi), actions_at(given, hi), seeds_at(seeds, hi), 0
    for t in range(first_step, last_step):
        for i in range(lo, hi):
            env = arrays.envs[i]
            if mode == RESET:
                if not chosen[i]:
                    continue
                reset_env(i, env, arrays)
            else:
                if mode == PLAY:
                    sample_action(seeds[i], t, actions, i)
                ended += advance_env(i, env, actions[i], mode != NEXT_STEP, arrays)
            zero_obs(arrays.obs[i])
            publish(i, env, arrays.obs[i], arrays)
    return ended


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
