"""The rules of curricula: which ranges they give, when a gate opens, where learning progress goes, and what they refuse."""

import json

import numpy as np
import pytest

from hurtle.collect.curriculum import EVENLY, FAST, SLOW, by_level, make_rules, read_rule
from hurtle.errors import HurtleError


def levels(rule, level, returns):
    """The report of episodes that all ended at one level."""
    found = np.zeros((len(rule.edges), 2))
    found[level] = len(returns), np.sum(returns)
    return found


@pytest.mark.parametrize(
    ("text", "progress", "low", "high", "kind"),
    [
        ("uniform:0.25:1.0", 0.0, 0.25, 1.0, "f"),
        ("uniform:0.25:1.0", 1.0, 0.25, 1.0, "f"),
        ("uniform:3:12", 0.3, 3, 12, "i"),
        ("uniform:3:12.5", 0.3, 3.0, 12.5, "f"),
        ("linear:3:12:0.5", 0.0, 3, 3, "i"),
        ("linear:3:12:0.5", 0.25, 8, 8, "i"),  # 7.5, rounded to even
        ("linear:3:12:0.5", 0.5, 12, 12, "i"),
        ("linear:3:12:0.5", 1.0, 12, 12, "i"),
        ("linear:2.0:1.0", 0.25, 1.5, 1.5, "f"),
        ("linear:2.0:1.0:1", 0.25, 1.75, 1.75, "f"),
    ],
)
def test_schedules(text, progress, low, high, kind):
    found = read_rule(text).ranges(np.linspace(0, 0.99, 5), progress)
    for values, expected in zip(found, (low, high), strict=True):
        assert values.tolist() == [expected] * 5
        assert values.dtype.kind == kind


def test_a_gate_opens_as_soon_as_enough_recent_episodes_reach_the_return():
    rule = read_rule("gated:0.0:1.0:0.8:4:10")
    rule.update(levels(rule, 0, [1.0] * 9))
    assert rule.level == 0  # nine are too few
    rule.update(levels(rule, 0, [0.0]))
    assert rule.level == 1  # 9 of 10
    rule.update(levels(rule, 0, [1.0] * 50))  # old episodes, which began before it moved
    assert rule.level == 1
    rule.update(levels(rule, 1, [0.0] * 40))
    assert rule.metrics() == {"level": 1.0, "return": 0.0}
    for turn in range(1, 5):  # the bad start is forgotten: 10 of 20, then 15 of 20, then 17.5 of 20
        rule.update(levels(rule, 1, [1.0] * 10))
        assert (rule.level, turn) in ((1, 1), (1, 2), (2, 3), (2, 4))
    for _ in range(5):
        rule.update(levels(rule, rule.level, [1.0] * 10))
    assert rule.level == 4  # the last level is the last


def test_half_of_the_envs_play_the_frontier_and_the_others_all_values_so_far():
    rule = read_rule("gated:0.0:1.0:0.8:4:1")
    for _ in range(2):
        rule.update(levels(rule, rule.level, [1.0]))
    low, high = rule.ranges(np.zeros(4), 0.0)
    assert low.tolist() == [0.5, 0.0, 0.5, 0.0]
    assert high.tolist() == [0.5] * 4
    assert rule.edges.tolist() == [-np.inf, 0.125, 0.375, 0.625, 0.875]


def test_a_gate_may_lead_down_and_whole_numbers_have_no_more_steps_than_values():
    rule = read_rule("gated:5:2:1.0:10:1")
    assert rule.edges.tolist() == [-np.inf, 2.5, 3.5, 4.5]
    assert [values.tolist() for values in rule.ranges(np.zeros(2), 0.0)] == [[5, 5], [5, 5]]
    rule.update(levels(rule, 3, [2.0]))
    assert rule.level == 1
    assert [values.tolist() for values in rule.ranges(np.zeros(2), 0.0)] == [[4, 4], [4, 5]]
    rule.update(levels(rule, 3, [2.0]))  # what was easier does not count
    assert rule.level == 1
    rule.update(levels(rule, 2, [2.0]))
    assert rule.ranges(np.zeros(2), 0.0)[0].tolist() == [3, 3]


def test_learning_progress_agrees_with_averages_of_single_episodes():
    rule, rng = read_rule("progress:0.0:4.0:4"), np.random.default_rng(0)
    fast, slow = [None] * 4, [None] * 4
    for turn in range(30):
        report = np.zeros((4, 2))
        for level in range(4):
            count, mean = int(rng.integers(0, 6)), float(rng.normal(level * turn / 30))
            report[level] = count, count * mean
            for k in range(count):
                is_first = fast[level] is None
                share = 1.0 if is_first else FAST
                fast[level] = mean if is_first else fast[level] + share * (mean - fast[level])
                slow[level] = mean if is_first else slow[level] + SLOW * (mean - slow[level])
                assert k >= 0
        rule.update(report)
    changes = np.abs(np.array(fast) - np.array(slow))
    assert rule.probabilities == pytest.approx(EVENLY / 4 + (1 - EVENLY) * changes / changes.sum(), rel=1e-9)
    assert rule.metrics()["focus"] == changes.argmax() + 0.5


def test_learning_progress_plays_the_level_that_improves_and_then_the_next():
    rule = read_rule("progress:0.0:1.0:4")
    assert rule.probabilities.tolist() == [0.25] * 4  # nothing is known
    focus = []
    for turn in range(600):
        mastered = turn / 150  # level k improves from turn 150 k on
        means = np.clip(mastered - np.arange(4), 0.0, 1.0)
        counts = np.round(20 * rule.probabilities)
        rule.update(np.stack([counts, counts * means], axis=1))
        focus.append(int(rule.probabilities.argmax()))
    assert [focus[turn] for turn in (75, 225, 375, 525)] == [0, 1, 2, 3]
    low, high = rule.ranges(np.linspace(0.0, 0.9999, 1_000), 0.0)
    shares = np.bincount((low * 4).astype(int), minlength=4) / 1_000
    assert shares == pytest.approx(rule.probabilities, abs=0.002)
    assert (high - low == 0.25).all()


def test_bins_of_whole_numbers_part_all_values():
    rule = read_rule("progress:3:12:4")
    low, high = rule.ranges(np.array([0.1, 0.3, 0.6, 0.9]), 0.0)
    assert list(zip(low.tolist(), high.tolist(), strict=True)) == [(3, 4), (5, 7), (8, 9), (10, 12)]
    assert rule.edges.tolist() == [3, 5, 8, 10]
    assert read_rule("progress:1:3:8").edges.tolist() == [1, 2, 3]


def test_returns_by_level_agree_with_a_loop():
    rng, edges = np.random.default_rng(1), np.array([-np.inf, 0.25, 0.5, 0.75])
    values, returns = rng.random(200).astype(np.float32), rng.normal(size=200)
    values[:4] = edges[1], edges[2], 2.0, -1.0
    expected = np.zeros((4, 2))
    for value, result in zip(values, returns, strict=True):
        expected[sum(value >= edge for edge in edges) - 1] += 1, result
    assert by_level(values, returns, edges) == pytest.approx(expected)
    assert by_level(np.zeros(0), np.zeros(0), edges).tolist() == [[0, 0]] * 4


@pytest.mark.parametrize("text", ["gated:0.0:1.0:0.5:4:3", "progress:0.0:1.0:5"])
def test_states_are_plain_and_continue_exactly(text):
    rule, other, rng = read_rule(text), read_rule(text), np.random.default_rng(2)
    for _ in range(4):
        rule.update(rng.random((5, 2)))
    other.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    for _ in range(10):
        report, uniforms = rng.random((5, 2)), rng.random(6)
        rule.update(report)
        other.update(report)
        found, expected = other.ranges(uniforms, 0.5), rule.ranges(uniforms, 0.5)
        assert all((a == b).all() for a, b in zip(found, expected, strict=True))
        assert other.metrics() == pytest.approx(rule.metrics(), nan_ok=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be one of uniform:LOW:HIGH, linear"),
        (3, "got 3"),
        ("unifrm:1:2", "Did you mean uniform"),
        ("uniform:1", "must be uniform:LOW:HIGH, got 'uniform:1'"),
        ("uniform:a:2", "with numbers, got 'uniform:a:2'"),
        ("uniform:1:inf", "with numbers"),
        ("uniform:2:1", "from low to high, got 2 to 1"),
        ("linear:1:2:0", "share of the run above 0 and up to 1, got 0"),
        ("gated:1:2", "must be gated:FROM:TO:RETURN"),
        ("gated:1:1:5", "from the easiest value to the hardest, got 1 twice"),
        ("gated:1:2:5:0", "at least 1 step and 1 episode"),
        ("gated:1:2:5:2.5", "whole numbers; got 2.5"),
        ("progress:1:1", "from low to high"),
        ("progress:1:2:1", "at least 2 bins, a whole number; got 1"),
    ],
)
def test_what_is_written_wrong_is_explained(text, message):
    with pytest.raises(ValueError, match=message):
        read_rule(text)


def test_rules_suit_the_dtypes_of_their_options():
    rules = make_rules({"a": "uniform:1:2", "b": "uniform:1:2"}, {"a": np.dtype(np.float32), "b": None})
    assert [rules[name].ranges(np.zeros(1), 0.0)[0].dtype.kind for name in "ab"] == ["f", "i"]
    with pytest.raises(HurtleError, match="size is an option that holds whole numbers"):
        make_rules({"size": "uniform:0.5:2"}, {"size": np.dtype(np.int8)})
