"""`hurtle.emulate` on multi-agent envs: rows, masks, who is there, padding, PettingZoo's interface, real envs."""

import copy
import pickle
import warnings

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import ResetNeeded

pytest.importorskip("pettingzoo", reason='needs pip install "hurtle[pettingzoo]"')

from emulation_envs import Crowd, Mixed
from pettingzoo.test import parallel_api_test

from hurtle.emulation.agents import AgentRows, natural_order
from hurtle.emulation.parallel_env import EmulatedParallelEnv
from hurtle.emulation.start_checks import check_env, check_seeding
from hurtle.emulation.wrap import emulate
from hurtle.errors import ActionError, EmulationError, HurtleError

COMING_AND_GOING = [
    ["agent_10", "agent_2"],
    ["agent_2"],  # agent_10 ended
    ["agent_2", "agent_30"],  # agent_30 appears late
    ["agent_10", "agent_30"],  # agent_10 comes back, agent_2 ended
    [],
]


def rows_of(env):
    return AgentRows.zeros(env.layout.memory(env.num_agents_max), env.mask_size)


def outcome(env, rows):
    """The rows in short: observations, rewards, and the rows of each flag."""
    marked = [np.flatnonzero(flags).tolist() for flags in (rows.terminated, rows.truncated, rows.agent_mask)]
    return env.layout.flat(rows.memory).tolist(), rows.rewards.round(6).tolist(), *marked


def test_agents_are_sorted_naturally():
    assert natural_order(["b_1", "agent_10", "agent_2", "agent", 3]) == [3, "agent", "agent_2", "agent_10", "b_1"]
    env = emulate(Crowd(COMING_AND_GOING))
    assert env.possible_agents == ["agent_2", "agent_10", "agent_30"]
    assert env.num_agents_max == 3


def test_rows_of_agents_that_end_appear_late_and_come_back():
    env = emulate(Crowd(COMING_AND_GOING, ends={(3, "agent_2"): "truncated"}))
    rows = rows_of(env)
    rows.memory[:] = 7  # what was there before does not matter
    actions = np.array([1, 2, 3])
    assert env.reset_into(rows, seed=0) == {}
    assert outcome(env, rows) == ([[0, 2], [0, 10], [0, 0]], [0, 0, 0], [], [], [0, 1])

    over, infos = env.step_into(actions, rows)  # agent_10 ends: its flag, its reward, its last observation
    assert outcome(env, rows) == ([[1, 2], [1, 10], [0, 0]], [2.1, 10.2, 0], [1], [], [0])
    assert (over, infos) == (False, {"agent_10": {"episode": {"r": 10.2, "l": 1}}})

    over, infos = env.step_into(actions, rows)  # it stays away; agent_30 is new: no reward yet
    assert outcome(env, rows) == ([[2, 2], [0, 0], [2, 30]], [2.1, 0, 0], [], [], [0, 2])
    assert (over, infos) == (False, {})

    over, infos = env.step_into(actions, rows)
    assert outcome(env, rows) == ([[3, 2], [3, 10], [3, 30]], [2.1, 0, 30.3], [], [0], [1, 2])
    assert not over
    assert infos == {"agent_2": {"episode": {"r": pytest.approx(6.3), "l": 3}}}

    over, infos = env.step_into(actions, rows)
    assert outcome(env, rows) == ([[0, 0], [4, 10], [4, 30]], [0, 10.2, 30.3], [1, 2], [], [])
    assert over
    assert infos == {"agent_10": {"episode": {"r": 10.2, "l": 1}}, "agent_30": {"episode": {"r": pytest.approx(60.6), "l": 2}}}
    assert [sorted(received) for received in env.env.received] == [sorted(listed) for listed in COMING_AND_GOING[:4]]
    assert env.env.received[0] == {"agent_2": 1, "agent_10": 2}

    with pytest.raises(ResetNeeded):
        env.step_into(actions, rows)
    env.reset_into(rows)
    assert outcome(env, rows) == ([[0, 2], [0, 10], [0, 0]], [0, 0, 0], [], [], [0, 1])


def test_an_agent_gone_without_a_flag_may_come_back_and_its_episode_goes_on():
    script = [["a_1", "a_2"], ["a_2"], ["a_1", "a_2"], []]
    env = emulate(Crowd(script, ends={(1, "a_1"): None}))
    rows = rows_of(env)
    env.reset_into(rows)
    env.step_into(np.zeros(2, int), rows)
    assert outcome(env, rows) == ([[0, 0], [1, 2]], [1, 2], [], [], [1])
    env.step_into(np.zeros(2, int), rows)
    over, infos = env.step_into(np.zeros(2, int), rows)
    assert over
    assert infos["a_1"]["episode"] == {"r": 2.0, "l": 2}


def test_an_env_that_empties_without_flags_terminates_its_agents():
    env = emulate(Crowd([["a_1", "a_2"], []], ends={(1, "a_1"): None, (1, "a_2"): "truncated"}))
    rows = rows_of(env)
    env.reset_into(rows)
    over, infos = env.step_into(np.zeros(2, int), rows)
    assert over
    assert (rows.terminated.tolist(), rows.truncated.tolist()) == ([True, False], [False, True])
    assert set(infos) == {"a_1", "a_2"}


def test_an_env_that_ends_with_nobody_in_it_says_so_in_every_row():
    env = Crowd([[], []])
    env.possible_agents = ["a_1", "a_2"]
    env = emulate(env)
    rows = rows_of(env)
    env.reset_into(rows)
    assert env.step_into(np.zeros(2, int), rows) == (True, {})
    assert rows.terminated.all()


def test_agents_that_stay_listed_after_their_end_are_absent():
    class Listing(Crowd):
        """Goes on listing the dead, and wants actions for them."""

        def step(self, actions):
            assert set(actions) == set(self.agents)
            observations, rewards, terminations, truncations, infos = super().step(actions)
            terminations["a_1"] = True
            return observations, rewards, terminations, truncations, infos

    env = emulate(Listing([["a_1", "a_2"]] * 3 + [[]]))
    rows = rows_of(env)
    env.reset_into(rows)
    actions = np.array([3, 3])
    over, infos = env.step_into(actions, rows)
    assert (over, rows.terminated.tolist(), rows.agent_mask.tolist()) == (False, [True, False], [False, True])
    assert infos == {"a_1": {"episode": {"r": 1.3, "l": 1}}}
    over, infos = env.step_into(actions, rows)
    assert outcome(env, rows) == ([[0, 0], [2, 2]], [0, 2.3], [], [], [1])
    assert env.env.received[1] == {"a_1": 0, "a_2": 3}
    assert env.step_into(actions, rows)[0]


# Without possible_agents: rows for whoever comes.


def test_agents_without_names_take_free_rows():
    script = [["a_10", "a_2"], ["a_10"], ["a_10", "a_7"], ["a_7", "a_8"], []]
    env = emulate(Crowd(script, possible=False), max_agents=2)
    assert env.possible_agents == ["slot_0", "slot_1"]
    rows = rows_of(env)
    env.reset_into(rows, seed=0)
    assert env.occupants == ["a_2", "a_10"]
    actions = np.array([1, 2])
    env.step_into(actions, rows)
    assert outcome(env, rows) == ([[1, 2], [1, 10]], [2.1, 10.2], [0], [], [1])
    env.step_into(actions, rows)
    assert env.occupants == ["a_7", "a_10"]
    assert outcome(env, rows) == ([[2, 7], [2, 10]], [0, 10.2], [], [], [0, 1])
    _, infos = env.step_into(actions, rows)  # a_10 ends, and a_8 takes its row at once: flag and reward are a_10's
    assert outcome(env, rows) == ([[3, 7], [3, 8]], [7.1, 10.2], [1], [], [0, 1])
    assert infos == {"slot_1": {"episode": {"r": pytest.approx(30.6), "l": 3}}}
    over, infos = env.step_into(actions, rows)
    assert over
    assert infos["slot_1"]["episode"] == {"r": 8.2, "l": 1}
    assert env.env.received[2] == {"a_10": 2, "a_7": 1}


def test_rows_without_names_need_a_maximum_that_suffices():
    with pytest.raises(EmulationError, match=r"crowd has no possible_agents.*max_agents="):
        emulate(Crowd([["a_1"]], possible=False))
    env = emulate(Crowd([["a_1"], ["a_1", "a_2", "a_3"]], possible=False), max_agents=2)
    rows = rows_of(env)
    env.reset_into(rows)
    with pytest.raises(EmulationError, match="crowd has 3 agents; increase max_agents=2"):
        env.step_into(np.zeros(2, int), rows)


def test_an_agent_without_a_name_that_vanishes_terminates():
    env = emulate(Crowd([["a_1", "a_2"], ["a_2"]], ends={(1, "a_1"): None}, possible=False), max_agents=3)
    rows = rows_of(env)
    env.reset_into(rows)
    env.step_into(np.zeros(3, int), rows)
    assert rows.terminated.tolist() == [True, False, False]


# Agents with different spaces.


def test_smaller_boxes_and_discretes_are_padded():
    env = emulate(
        Mixed(
            {"a_1": spaces.Box(1, 2, (2, 3), np.float32), "a_2": spaces.Box(-1, 1, (3, 1), np.float32)},
            {"a_1": spaces.Discrete(5, start=10), "a_2": spaces.Discrete(2)},
        )
    )
    assert env.agent_action_space == spaces.Discrete(5)
    assert env.agent_observation_space.shape == (3, 3)
    assert env.agent_observation_space.low.min() == -1
    assert env.agent_observation_space.high.max() == 2
    assert env.mask_size == 5
    rows = rows_of(env)
    env.reset_into(rows)
    first, second = env.layout.flat(rows.memory)
    assert first.tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
    assert second.tolist() == [[1, 0, 0], [1, 0, 0], [1, 0, 0]]
    assert rows.action_mask.tolist() == [[True] * 5, [True, True, False, False, False]]
    env.step_into(np.array([4, 1]), rows)
    env.step_into(np.array([0, 3]), rows)  # a_2 has no fourth choice: it counts as the first
    assert env.env.received == [{"a_1": 14, "a_2": 1}, {"a_1": 10, "a_2": 0}]


def test_smaller_action_vectors_are_padded():
    boxes = {"a_1": spaces.Box(-1, 1, (3,)), "a_2": spaces.Box(-2, 2, (1,))}
    env = emulate(Mixed(dict.fromkeys(boxes, spaces.Box(0, 1, (2,))), boxes))
    assert env.agent_action_space.shape == (3,)
    assert env.agent_action_space.low.tolist() == [-2, -1, -1]
    assert env.mask_size is None
    rows = rows_of(env)
    env.reset_into(rows)
    env.step_into(np.array([[0.5, -0.5, 1], [1.5, 9, 9]], np.float32), rows)
    (received,) = env.env.received
    assert received["a_1"].tolist() == [0.5, -0.5, 1]
    assert received["a_2"].tolist() == [1.5]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (spaces.Box(0, 1, (2,)), spaces.Box(0, 1, (2,), np.float64)),
        (spaces.Box(0, 1, (2,)), spaces.Box(0, 1, (2, 2))),
        (spaces.Box(0, 1, (2,)), spaces.Discrete(2)),
    ],
)
def test_spaces_with_nothing_in_common_are_refused_by_agent(one, other):
    same = spaces.Box(0, 1, (2,))
    with pytest.raises(EmulationError, match=r"observation space.*agent 'a_1' has .*, agent 'a_2' has "):
        emulate(Mixed({"a_1": one, "a_2": other}, {"a_1": spaces.Discrete(2), "a_2": spaces.Discrete(2)}))
    with pytest.raises(EmulationError, match=r"action space.*agent 'a_1' has .*, agent 'a_2' has "):
        emulate(Mixed({"a_1": same, "a_2": same}, {"a_1": one, "a_2": other}))


def test_featurize_can_make_spaces_alike():
    env = Mixed(
        {"a_1": spaces.Box(0, 1, (2,)), "a_2": spaces.Box(0, 1, (4, 4))},
        {"a_1": spaces.Discrete(2), "a_2": spaces.Discrete(2)},
    )
    env = emulate(env, featurize=lambda obs: {"sum": obs.sum(), "size": np.int32(obs.size)})
    observations, _ = env.reset(seed=0)
    assert env.unflatten(observations["a_2"]) == {"size": 16, "sum": 16}
    assert env.unflatten(observations["a_1"]) == {"size": 2, "sum": 2}


# Action masks.


def test_masks_in_infos_are_found_by_a_reset():
    env = emulate(Crowd(COMING_AND_GOING, masks=True))
    assert env.mask_size == 4
    rows = rows_of(env)
    env.reset_into(rows)
    odd, free = [False, True, False, True], [True] * 4
    assert rows.action_mask.tolist() == [odd, odd, free]  # an absent agent's row stays finite under a masked softmax
    env.step_into(np.ones(3, int), rows)
    assert rows.action_mask.tolist() == [odd, free, free]


def test_masks_in_observations_are_found_in_the_space():
    class Masked(Crowd):
        def observation_space(self, agent):
            return spaces.Dict(observation=super().observation_space(agent), action_mask=spaces.Box(0, 1, (4,), np.int8))

        def observe(self, agents):
            mask = np.array([0, 0, self.time == 0, 0], np.int8)
            return {agent: {"observation": obs, "action_mask": mask} for agent, obs in super().observe(agents).items()}

    env = emulate(Masked([["a_1"]] * 3))
    assert env.mask_size == 4
    rows = rows_of(env)
    env.reset_into(rows)
    assert rows.action_mask.tolist() == [[False, False, True, False]]
    assert env.unflatten(env.layout.flat(rows.memory)[0])["action_mask"].tolist() == [0, 0, 1, 0]
    env.step_into(np.array([2]), rows)
    assert rows.action_mask.tolist() == [[True] * 4]  # nothing is legal: nothing that is chosen matters


def test_a_mask_of_the_wrong_size_is_named():
    env = Crowd([["a_1"]], masks=True)
    env.infos = lambda agents: {agent: {"action_mask": np.ones(3, np.int8)} for agent in agents}
    with pytest.raises(EmulationError, match=r'action_mask\["a_1"\]: expected 4 entries, one per choice, got 3'):
        emulate(env).reset(seed=0)


# Errors.


def test_unknown_agents_are_named():
    env = Crowd([["a_1"], ["a_1", "b_2"]])
    env.possible_agents = ["a_1"]
    env = emulate(env)
    env.reset(seed=0)
    with pytest.raises(EmulationError, match=r"Agent 'b_2' is in env\.agents but not in possible_agents \(a_1\)"):
        env.step({"a_1": 0})

    class Whispering(Crowd):
        def observe(self, agents):
            return super().observe([*agents, "ghost_9"])

    with pytest.raises(EmulationError, match=r"Agent 'ghost_9' is in the observations but not in possible_agents"):
        emulate(Whispering([["a_1"]])).reset(seed=0)


def test_missing_observations_and_actions_are_named():
    class Silent(Crowd):
        def observe(self, agents):
            return {}

    with pytest.raises(EmulationError, match=r"Agent 'a_1' is in env\.agents, but the env returned no observation"):
        emulate(Silent([["a_1"]])).reset(seed=0)
    env = emulate(Crowd([["a_1", "a_2"]] * 2))
    with pytest.raises(ResetNeeded):
        env.step({})
    env.reset(seed=0)
    with pytest.raises(ActionError, match=r"Agent 'a_2' is present but got no action; got actions for \['a_1'\]"):
        env.step({"a_1": 0})


def test_wrong_values_are_named_by_agent_and_leaf():
    class Wrong(Crowd):
        def observe(self, agents):
            return {agent: np.zeros(3, np.float32) for agent in agents}

    with pytest.raises(EmulationError, match=r'observation\["a_1"\]: expected float32 of shape \(2,\), got .*\(3,\)'):
        emulate(Wrong([["a_1"]])).reset(seed=0)

    class Unpaid(Crowd):
        def step(self, actions):
            observations, rewards, *rest = super().step(actions)
            return observations, {**rewards, "a_2": None}, *rest

    env = emulate(Unpaid([["a_1", "a_2"]] * 2))
    env.reset(seed=0)
    with pytest.raises(EmulationError, match=r'reward\["a_2"\]: expected a number, got NoneType None'):
        env.step({"a_1": 0, "a_2": 0})


def test_rows_need_flat_spaces():
    env = emulate(Crowd(COMING_AND_GOING), observations=False)
    with pytest.raises(HurtleError, match="Rows hold flat observations and actions"):
        env.reset_into(AgentRows.zeros(np.zeros((3, 8), np.uint8)))


# The face of PettingZoo.


def test_dicts_hold_all_agents_and_infos_say_who_is_there():
    env = emulate(Crowd(COMING_AND_GOING, ends={(3, "agent_2"): "truncated"}))
    names = ["agent_2", "agent_10", "agent_30"]
    observations, infos = env.reset(seed=0)
    assert list(observations) == env.agents == names
    assert [infos[name]["agent_mask"] for name in names] == [True, True, False]
    present, ended = [], {}
    while env.agents:
        assert env.agents == names
        result = env.step(dict.fromkeys(names, 1))
        _, _, terminations, truncations, infos = result
        assert all(list(part) == names for part in result)
        present.append([name for name in names if infos[name]["agent_mask"]])
        ended |= {(len(present), name): info for name, info in infos.items() if "episode" in info}
        if env.agents:  # agents that stay listed are not flagged, as PettingZoo wants it
            assert not any(terminations.values())
            assert not any(truncations.values())
    assert present == [["agent_2"], ["agent_2", "agent_30"], ["agent_10", "agent_30"], []]
    assert set(ended) == {(1, "agent_10"), (3, "agent_2"), (4, "agent_10"), (4, "agent_30")}
    assert (ended[1, "agent_10"]["terminated"], ended[1, "agent_10"]["truncated"]) == (True, False)
    assert (ended[3, "agent_2"]["terminated"], ended[3, "agent_2"]["truncated"]) == (False, True)
    assert terminations == {"agent_2": False, "agent_10": True, "agent_30": True}  # how each of them ended
    assert truncations == {"agent_2": True, "agent_10": False, "agent_30": False}


def test_without_padding_only_live_agents_show_with_their_own_flags():
    env = emulate(Crowd(COMING_AND_GOING), pad_agents=False)
    observations, infos = env.reset(seed=0)
    assert list(observations) == list(infos) == env.agents == ["agent_2", "agent_10"]
    observations, rewards, terminations, _, infos = env.step({"agent_2": 0, "agent_10": 0})
    assert env.agents == ["agent_2"]
    assert terminations == {"agent_2": False, "agent_10": True}
    assert rewards == {"agent_2": 2, "agent_10": 10}
    assert infos["agent_10"] == {"episode": {"r": 10.0, "l": 1}, "agent_mask": False}
    observations, rewards, *_ = env.step({"agent_2": 0})
    assert env.agents == list(observations) == ["agent_2", "agent_30"]
    assert rewards == {"agent_2": 2, "agent_30": 0}


@pytest.mark.parametrize("pad", [True, False])
def test_observations_and_actions_can_be_left_alone(pad):
    class Talking(Crowd):
        def observation_space(self, agent):
            return spaces.Dict(words=spaces.Sequence(spaces.Discrete(9)), time=spaces.Box(0, 100, (), np.float32))

        def action_space(self, agent):
            return spaces.Dict(go=spaces.Discrete(2), far=spaces.Box(0, 1, ()))

        def observe(self, agents):
            return {agent: {"words": (1, 2), "time": np.float32(self.time)} for agent in agents}

        def step(self, actions):
            return super().step({agent: action["far"] for agent, action in actions.items()})

    env = emulate(Talking(COMING_AND_GOING), observations=False, actions=False, pad_agents=pad)
    observations, _ = env.reset(seed=0)
    assert observations["agent_2"] == {"words": (1, 2), "time": 0}
    assert env.observation_space("agent_2") is env.observation_space("agent_2")
    _, rewards, *_ = env.step({name: {"go": 1, "far": 0.5} for name in env.agents})
    assert rewards["agent_2"] == pytest.approx(2.05)
    if pad:
        assert observations["agent_30"] == {"words": (), "time": 0}


def test_hooks_run_per_agent():
    def shaped(reward, observation, action, info):
        return reward + 100 * observation[0] + 1000 * action

    env = emulate(Crowd(COMING_AND_GOING), featurize=lambda obs: obs[1:] * 2, shape_reward=shaped)
    observations, _ = env.reset(seed=0)
    assert observations == {"agent_2": [4], "agent_10": [20], "agent_30": [0]}
    _, rewards, *_, infos = env.step({"agent_2": 1, "agent_10": 2, "agent_30": 0})
    assert rewards == {"agent_2": pytest.approx(1102.1), "agent_10": pytest.approx(2110.2), "agent_30": 0}
    assert infos["agent_2"]["raw_reward"] == 2.1
    assert infos["agent_10"]["episode"]["r"] == pytest.approx(2110.2)


def test_prints_are_captured(capsys):
    class Loud(Crowd):
        def step(self, actions):
            print("step", self.time)
            return super().step(actions)

    env = emulate(Loud(COMING_AND_GOING), capture_prints=True)
    env.reset(seed=0)
    env.step(dict.fromkeys(env.agents, 0))
    assert (env.prints, capsys.readouterr().out) == (["step 0"], "")


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))], ids=["deepcopy", "pickle"])
def test_copies_go_on_alike_in_memory_of_their_own(clone):
    env = emulate(Crowd(COMING_AND_GOING))
    env.reset(seed=0)
    twin = clone(env)
    while env.agents:
        actions = dict.fromkeys(env.agents, 2)
        (observations, *rest), (twin_observations, *twin_rest) = env.step(actions), twin.step(actions)
        assert {name: obs.tolist() for name, obs in observations.items()} == {
            n: o.tolist() for n, o in twin_observations.items()
        }
        assert rest == twin_rest
    assert not twin.agents


def test_both_faces_give_the_same_numbers():
    dicts, arrays = emulate(Crowd(COMING_AND_GOING)), emulate(Crowd(COMING_AND_GOING))
    rows = rows_of(arrays)
    observations, _ = dicts.reset(seed=0)
    arrays.reset_into(rows, seed=0)
    over = False
    while not over:
        assert np.array_equal(np.stack(list(observations.values())), arrays.layout.flat(rows.memory))
        observations, rewards, *_ = dicts.step(dict.fromkeys(dicts.agents, 3))
        over, _ = arrays.step_into(np.full(3, 3), rows)
        assert list(rewards.values()) == rows.rewards.tolist()
    assert dicts.agents == []


def test_several_rows_can_take_turns():
    env = emulate(Crowd([["a_1", "a_2"]] * 10))
    pair = [rows_of(env), rows_of(env)]
    env.reset_into(pair[0])
    for time in range(1, 5):
        env.step_into(np.zeros(2, int), pair[time % 2])
        now, before = (env.layout.flat(rows.memory)[0, 0] for rows in (pair[time % 2], pair[1 - time % 2]))
        assert (now, before) == (time, time - 1)


# Real envs.


@pytest.fixture(autouse=True)
def without_a_window(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")


def knights():
    module = pytest.importorskip("pettingzoo.butterfly.knights_archers_zombies_v11", reason='needs "hurtle[pettingzoo]"')
    return module.parallel_env(max_cycles=200, max_zombies=20, spawn_delay=4)


def pursuit():
    return pytest.importorskip("pettingzoo.sisl.pursuit_v5", reason='needs "hurtle[pettingzoo]"').parallel_env(max_cycles=20)


def rock_paper_scissors():
    return pytest.importorskip("pettingzoo.classic.rps_v2", reason='needs "hurtle[pettingzoo]"').env()


def connect_four():
    return pytest.importorskip("pettingzoo.classic.connect_four_v3", reason='needs "hurtle[pettingzoo]"').raw_env()


def world():
    module = pytest.importorskip("mpe2.simple_world_comm_v3", reason='needs "hurtle[pettingzoo]"')
    return module.parallel_env(max_cycles=20)


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize(
    "make", [lambda: Crowd(COMING_AND_GOING[:3]), knights, pursuit, rock_paper_scissors, world], ids=lambda make: make.__name__
)
def test_pettingzoo_accepts_the_emulated_env(make, pad, capsys):
    env = emulate(make, pad_agents=pad)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Live agent was not given|Agent was given")
        parallel_api_test(env, num_cycles=60)


def test_agents_die_one_by_one_in_a_real_env():
    env = emulate(knights())
    assert env.possible_agents == ["archer_0", "archer_1", "knight_0", "knight_1"]
    rows, rng = rows_of(env), np.random.default_rng(0)
    env.reset_into(rows, seed=0)
    assert rows.agent_mask.all()
    alive, deaths, over = rows.agent_mask.copy(), 0, False
    while not over:
        over, _ = env.step_into(rng.integers(0, 6, 4), rows)
        ended = rows.terminated | rows.truncated
        assert not (ended & ~alive).any()
        assert np.array_equal(rows.agent_mask, alive & ~ended)
        deaths += int((rows.agent_mask < alive).sum()) if not over else 0
        alive = rows.agent_mask.copy()
    assert deaths > 0


def test_a_turn_based_game_is_played_by_its_masks_to_a_legal_end():
    env = emulate(connect_four())
    assert env.mask_size == 7
    rows, rng = rows_of(env), np.random.default_rng(1)
    for _ in range(3):
        env.reset_into(rows, seed=0)
        over, returns = False, np.zeros(2)
        while not over:
            assert rows.action_mask.any(1).all()
            over, infos = env.step_into(np.array([rng.choice(np.flatnonzero(mask)) for mask in rows.action_mask]), rows)
            returns += rows.rewards
        assert rows.terminated.all()
        assert sorted(returns) in ([-1, 1], [0, 0])
        assert infos["player_0"]["episode"]["r"] == returns[0]
        assert infos["player_0"]["episode"]["l"] >= 7


@pytest.mark.parametrize("make", [knights, pursuit, rock_paper_scissors, connect_four, world])
def test_the_start_up_check_accepts_real_envs(make, capsys):
    check_env(make())
    assert "Illegal" not in capsys.readouterr().out


def test_unseeded_randomness_is_reported_by_agent():
    rng = np.random.default_rng()

    class Unseeded(Crowd):
        def observe(self, agents):
            return {a: np.array([0, 0 if a == "a_1" else rng.uniform()], np.float32) for a in agents}

    with pytest.warns(UserWarning, match=r'observation\["a_2"\] differs'):
        check_seeding(emulate(Unseeded([["a_1", "a_2"]])))


def test_what_is_emulated_already_is_returned():
    env = emulate(Crowd(COMING_AND_GOING))
    assert isinstance(env, EmulatedParallelEnv)
    assert emulate(env) is env
    assert isinstance(emulate(lambda: Crowd(COMING_AND_GOING)), EmulatedParallelEnv)


def test_pettingzoo_missing_is_named(run_python):
    code = """
import sys
sys.modules["pettingzoo"] = None
from emulation_envs import Crowd
from hurtle.emulation.wrap import emulate
try:
    emulate(Crowd([["a_1"]]))
except Exception as error:
    print(type(error).__name__, error)
"""
    expected = 'HurtleError Envs with several agents need PettingZoo: pip install "hurtle[pettingzoo]".\n'
    assert run_python(code).stdout == expected
