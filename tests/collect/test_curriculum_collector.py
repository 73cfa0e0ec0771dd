"""Collectors under a curriculum: returns belong to the value they were played with, in every gear; states continue exactly."""

import numpy as np
import pytest
from ladder_envs import Ladder, PythonLadder

import hurtle
from hurtle.collect.compiled_actor import CompiledActor
from hurtle.collect.curriculum import by_level, make_rules
from hurtle.collect.curriculum_collector import CurriculumCollector
from hurtle.collect.device_collector import DeviceCollector
from hurtle.collect.general_collector import GeneralCollector
from hurtle.collect.inference import Actor
from hurtle.collect.native_collector import NativeCollector
from hurtle.contracts import Collector, Episodes
from hurtle.errors import HurtleError
from hurtle.policies.build import PolicyConfig, build_policy

ENVS, STEPS, SEED = 6, 16, 3
TEXTS = {"size": "progress:1:6:3", "push": "uniform:0.5:1.0"}


class Recorder:
    """A rule that changes its ranges all the time, and keeps what it hears."""

    def __init__(self, edges=None):
        self.edges, self.heard, self.seen, self.turn = edges, [], [], 0

    def ranges(self, uniforms, progress):
        self.seen.append((uniforms.copy(), progress))
        self.turn += 1
        values = np.full(len(uniforms), 1 + self.turn % 7)
        return values, values

    def update(self, levels):
        self.heard.append(levels)

    def metrics(self):
        return {"turn": float(self.turn)}

    def state_dict(self):
        return {"turn": self.turn}

    def load_state_dict(self, saved):
        self.turn = saved["turn"]


def collector(gear, rules=None, env=Ladder, texts=TEXTS, total_steps=ENVS * STEPS * 10, **settings):
    vec = hurtle.make_vec(env, ENVS, drawn=("size", "push"), **settings)
    policy = build_policy(PolicyConfig(hidden_sizes=(8,)), vec.agent_observation_space, vec.agent_action_space, seed=0)
    rules = make_rules(texts, vec.drawn) if rules is None else rules
    if gear == "native":
        inner = NativeCollector(vec, policy, SEED)
    elif gear == "device":
        edges = {name: rule.edges for name, rule in rules.items() if rule.edges is not None}
        inner = DeviceCollector(vec, policy, SEED, edges=edges)
    else:
        inner = GeneralCollector(vec, (Actor if gear == "general" else CompiledActor)(policy, ENVS, SEED), SEED)
    return CurriculumCollector(inner, vec, rules, texts, SEED, total_steps)


@pytest.mark.parametrize(
    ("gear", "env", "backend"),
    [
        ("native", Ladder, "auto"),
        ("general", Ladder, "auto"),
        ("device", Ladder, "auto"),
        ("compiled actor", Ladder, "serial"),
        ("general", PythonLadder, "serial"),
    ],
)
def test_returns_count_for_the_value_they_were_played_with(gear, env, backend):
    """A step is worth `size`, so that a return divided by its length is the value in force; ranges change in mid-episode."""
    edges = np.arange(1.0, 8.0)
    rules = {"size": Recorder(edges), "push": Recorder()}
    made = collector(gear, rules, env, backend=backend)
    rollout, steps = made.new_rollout(STEPS), np.zeros(7)
    for _ in range(12):
        episodes = made.collect(rollout)
        levels = rules["size"].heard[-1]
        assert levels[:, 0].sum() == episodes.count > 0
        if gear != "device":
            assert (episodes.returns == episodes.metrics["size"] * episodes.lengths).all()
            assert (levels == by_level(episodes.metrics["size"], episodes.returns, edges)).all()
        steps += levels[:, 1] / np.arange(1, 8)
        per_step = levels[:, 1][levels[:, 0] > 0] / np.arange(1, 8)[levels[:, 0] > 0]
        assert (per_step == per_step.round()).all()  # a sum of returns of value v is a multiple of v …
        assert (per_step <= 3 * levels[:, 0][levels[:, 0] > 0]).all()  # … and of at most three steps each
    assert (steps > 0).all()
    made.close()


@pytest.mark.parametrize("gear", ["general", "device"])
def test_gears_play_and_hear_the_same(gear):
    native, other = collector("native"), collector(gear)
    rollouts = native.new_rollout(STEPS), other.new_rollout(STEPS)
    for _ in range(8):
        expected, found = native.collect(rollouts[0]), other.collect(rollouts[1])
        assert (rollouts[1].obs == rollouts[0].obs).all()
        assert (rollouts[1].actions == rollouts[0].actions).all()
        assert found.count == expected.count
        assert other.metrics() == pytest.approx(native.metrics(), rel=1e-12)
    assert native.metrics()["curriculum/size_progress"] > 0
    native.close()
    other.close()


def test_ranges_change_between_rollouts_with_progress_and_draws_of_their_own():
    rules = {"size": Recorder(), "push": Recorder()}
    made = collector("native", rules, total_steps=ENVS * STEPS * 4)
    rollout = made.new_rollout(STEPS)
    for _ in range(6):
        made.collect(rollout)
    progresses = [progress for _, progress in rules["size"].seen]
    assert progresses == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0]  # once when it is made
    draws = np.array([uniforms for rule in rules.values() for uniforms, _ in rule.seen[1:]])
    assert len(np.unique(draws)) == draws.size  # every option, rollout and env has a number of its own
    assert made.metrics() == {
        "curriculum/size": 1.0,
        "curriculum/size_low": 1.0,
        "curriculum/size_high": 1.0,
        "curriculum/size_turn": 7.0,
        "curriculum/push": 1.0,
        "curriculum/push_low": 1.0,
        "curriculum/push_high": 1.0,
        "curriculum/push_turn": 7.0,
    }


def test_the_number_of_threads_changes_nothing():
    one, two = (collector("native", num_workers=threads) for threads in (1, 2))
    rollouts = one.new_rollout(STEPS), two.new_rollout(STEPS)
    for _ in range(5):
        one.collect(rollouts[0])
        two.collect(rollouts[1])
        assert (rollouts[0].obs == rollouts[1].obs).all()
    assert one.metrics() == two.metrics()


@pytest.mark.parametrize("gear", ["native", "general", "device"])
def test_a_saved_state_continues_exactly(gear):
    made, other = collector(gear), collector(gear)
    rollout, theirs = made.new_rollout(STEPS), other.new_rollout(STEPS)
    for _ in range(4):
        made.collect(rollout)
    other.load_state_dict(made.state_dict())
    for _ in range(4):
        made.collect(rollout)
        other.collect(theirs)
        assert (theirs.obs == rollout.obs).all()
        assert other.metrics() == made.metrics()


def test_without_the_states_of_the_envs_the_rules_go_on_in_new_episodes():
    made = collector("native", texts={"size": "gated:1:6:1.0:5:4", "push": "uniform:1:2"})
    other = collector("native", texts={"size": "gated:1:6:1.0:5:4", "push": "uniform:1:2"})
    rollout = made.new_rollout(STEPS)
    for _ in range(3):
        made.collect(rollout)
    level = made.metrics()["curriculum/size_level"]
    assert level > 0
    saved = made.state_dict(with_envs=False)
    other.load_state_dict(saved)
    other.collect(other.new_rollout(STEPS))
    assert other.metrics()["curriculum/size_level"] >= level
    changed = collector("native", texts={"size": "gated:1:6:9.0:5:4", "push": "uniform:1:2"})
    changed.load_state_dict(saved)  # another rule begins anew
    changed.collect(changed.new_rollout(STEPS))
    assert changed.metrics()["curriculum/size_level"] == 0


def test_levels_are_joined_and_several_agents_refused():
    parts = [Episodes.from_totals(2, 4.0, 3.0, 6.0, 3.0, {}, {"a": np.ones((3, 2))}) for _ in range(2)]
    assert Episodes.join([*parts, Episodes()]).levels["a"].tolist() == [[2.0, 2.0]] * 3
    assert Episodes.join([Episodes.of([1.0], [2]), Episodes()]).levels == {}
    vec = hurtle.make_vec("snake", 2, debug=True)
    with pytest.raises(HurtleError, match="judged by returns, which needs envs with one agent"):
        CurriculumCollector(collector("native"), vec, {"size": Recorder(np.zeros(2))}, {}, 0, 1)


def test_nothing_of_the_contract_is_left_out():
    """What it does not forward would silently be a default."""
    named = {name for name in (*vars(Collector), *Collector.__annotations__) if not name.startswith("_")}
    made = {"num_rows", "resumes_exactly", "closes_midway", "is_away", "runs_ahead"}  # set when it is made
    assert named - vars(CurriculumCollector).keys() == made
