"""One step of one env, the same on every target: the author's step, then truncation, statistics, autoreset, observation.

action → step → steps/returns → ended? → final observation → reset → observe. Knows no loops, threads or devices.
Its text is pasted into every generated module (see generate.py).
"""

from hurtle.native.pasted import (
    AGENTS,
    begin_agent,
    call_observe,
    call_reset,
    call_step,
    clear_state,
    f4,
    is_present,
    jit,
    part,
    write_mask,
    write_metrics,
    write_present,
    zero_obs,
)


@part
def begin_episode(env, arrays):
    clear_state(env)
    call_reset(env, arrays)
    env._steps = 0
    for a in range(AGENTS):
        begin_agent(env, a)


@jit
def publish(i, env, obs, arrays):
    """Write what the next action depends on: observation (over zeros), action mask, present agents."""
    call_observe(env, obs, arrays)
    write_mask(env, arrays.mask[i], arrays)
    write_present(env, arrays.present[i], arrays)


@jit
def clear_outcome(i, arrays):
    arrays.ended[i] = False
    for a in range(AGENTS):
        arrays.reward[i, a] = f4(0.0)
        arrays.terminated[i, a] = False
        arrays.truncated[i, a] = False
        arrays.episode_ended[i, a] = False


@part
def reset_env(i, env, arrays):
    """Begin a new episode in env i, whose record is `env`. Call `publish` next."""
    clear_outcome(i, arrays)
    begin_episode(env, arrays)


@part
def end_episode(i, env, same_step, arrays):
    """End the episode of env i: save its metrics and final observation, then reset now or in the next step."""
    write_metrics(env, arrays.episode_metrics[i])
    if same_step:
        zero_obs(arrays.final_obs[i])
        call_observe(env, arrays.final_obs[i], arrays)
        begin_episode(env, arrays)
    else:
        env._steps = -1


@jit
def advance_one(i, env, action, same_step, arrays):
    """Step env i, which has one agent; returns the number of episodes that ended. Call `publish` next."""
    if env._steps < 0:  # NEXT_STEP: the episode ended one step ago, and this step is its reset
        reset_env(i, env, arrays)
        return 0
    gained, terminated = call_step(env, action, arrays)
    env._steps += 1
    env._return[0] += f4(gained)
    truncated = env._steps >= arrays.max_steps[i]
    ended = terminated or truncated
    arrays.reward[i, 0] = gained
    arrays.terminated[i, 0] = terminated
    arrays.truncated[i, 0] = truncated
    arrays.episode_ended[i, 0] = ended
    arrays.ended[i] = ended
    if not ended:
        return 0
    arrays.episode_return[i, 0] = env._return[0]
    arrays.episode_length[i, 0] = env._steps
    end_episode(i, env, same_step, arrays)
    return 1


@jit
def advance_many(i, env, action, same_step, arrays):
    """Step env i, which has several agents; returns the number of agents' episodes that ended. Call `publish` next."""
    if env._steps < 0:
        reset_env(i, env, arrays)
        return 0
    clear_outcome(i, arrays)
    write_present(env, arrays.present[i], arrays)  # again: the user may have written to the state
    reward = arrays.reward[i]
    terminated = arrays.terminated[i]
    over = call_step(env, action, reward, terminated, arrays)
    env._steps += 1
    out_of_time = env._steps >= arrays.max_steps[i]
    episodes_ended = 0
    for a in range(AGENTS):
        if is_present(env, a):
            env._return[a] += reward[a]
            if over:
                terminated[a] = True
            arrays.truncated[i, a] = out_of_time
            if terminated[a] or out_of_time:
                arrays.episode_ended[i, a] = True
                arrays.episode_return[i, a] = env._return[a]
                arrays.episode_length[i, a] = env._steps - env._start[a]
                begin_agent(env, a)
                episodes_ended += 1
        else:
            reward[a] = f4(0.0)
            terminated[a] = False
    if not (over or out_of_time):
        return episodes_ended
    if episodes_ended == 0:  # nobody is left to report the end, so every row does
        episodes_ended = 1
        for a in range(AGENTS):
            terminated[a] = over
            arrays.truncated[i, a] = out_of_time
    arrays.ended[i] = True
    end_episode(i, env, same_step, arrays)
    return episodes_ended
