"""One step of one env, the same on every target: the author's step, then truncation, statistics, autoreset, observation.

action → step → steps/returns → ended? → final observation → reset → observe. Knows no loops, threads or devices.
Its text is pasted into every generated module (see build.py).
"""

from hurtle.native.pasted import (
    AGENTS,
    MAX_STEPS,
    agent_start,
    begin_agent,
    clear_state,
    env_reset,
    f4,
    is_present,
    jit,
    observe,
    step_agents,
    write_mask,
    write_metrics,
    write_present,
)


@jit
def begin_episode(env):
    clear_state(env)
    env_reset(env, env)
    env._steps = 0
    for a in range(AGENTS):
        begin_agent(env, a)


@jit
def publish(i, env, obs, arrays):
    """Write what the next action is chosen from: observation, action mask, who is present."""
    observe(env, obs)
    write_mask(env, arrays.mask[i])
    write_present(env, arrays.present[i])


@jit
def clear_outcome(i, arrays):
    arrays.ended[i] = False
    for a in range(AGENTS):
        arrays.reward[i, a] = f4(0.0)
        arrays.terminated[i, a] = False
        arrays.truncated[i, a] = False
        arrays.episode_ended[i, a] = False


@jit
def reset_env(i, env, obs, arrays):
    """Begin a new episode in env i, whose record is `env`; its observation goes to the row `obs`."""
    clear_outcome(i, arrays)
    begin_episode(env)
    publish(i, env, obs, arrays)


@jit
def step_env(i, env, action, same_step, obs, arrays):
    """Step env i, whose record is `env`; returns the number of agents whose episode ended with this step."""
    if env._steps < 0:  # NEXT_STEP: the episode ended one step ago, and this step is its reset
        reset_env(i, env, obs, arrays)
        return 0

    clear_outcome(i, arrays)
    reward = arrays.reward[i]
    terminated = arrays.terminated[i]
    over = step_agents(env, action, reward, terminated)
    env._steps += 1
    out_of_time = MAX_STEPS > 0 and env._steps >= MAX_STEPS  # noqa: SIM300
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
                arrays.episode_length[i, a] = env._steps - agent_start(env, a)
                begin_agent(env, a)
                episodes_ended += 1

    if over or out_of_time:
        arrays.ended[i] = True
        write_metrics(env, arrays.episode_metrics[i])
        if same_step:
            observe(env, arrays.final_obs[i])
            begin_episode(env)
        else:
            env._steps = -1
    publish(i, env, obs, arrays)
    return episodes_ended
