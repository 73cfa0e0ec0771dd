"""Parts of a search: spaces, the Gaussian process against its formulas, acquisition, pruning, finalists, the journal."""

import math
import random

import numpy as np
import pytest

from hurtle.algorithms.algorithm import algorithm_names
from hurtle.errors import HurtleError
from hurtle.experiments.space import Dimension, Space, default_space, read_space
from hurtle.experiments.sweeps import cost_aware
from hurtle.experiments.sweeps.cost_aware import CostAwareSearch, expected_improvement
from hurtle.experiments.sweeps.finalists import checked, choose_finalists, winner
from hurtle.experiments.sweeps.gaussian_process import GaussianProcess
from hurtle.experiments.sweeps.importance import importance
from hurtle.experiments.sweeps.pruning import falls_behind
from hurtle.experiments.sweeps.search import RandomSearch, normal_scores
from hurtle.experiments.sweeps.trials import Journal, Trial, pareto_front
from hurtle.runners.settings import make_settings, settings_to_dict

LINE = Space((Dimension("learning_rate", 1e-5, 1e-1, "log"), Dimension("gamma", 0.8, 0.999, "near_one")))


def trial(number, score=math.nan, seconds=1.0, values=None, **more):
    return Trial(number, values or {}, state=more.pop("state", "finished"), score=score, seconds=seconds, **more)


# Spaces


@pytest.mark.parametrize(
    "dimension",
    [
        Dimension("a", -1.0, 3.0),
        Dimension("a", 1e-5, 1.0, "log"),
        Dimension("a", 0.8, 0.999, "near_one"),
        Dimension("a", 4.0, 64.0, "power_of_two", whole=True),
        Dimension("a", 1.0, 7.0, whole=True),
        Dimension("a", 1.0, 300.0, "log", whole=True),
        Dimension("a", choices=(True, False)),
        Dimension("a", choices=((64, 64), (32, 32), (256,))),
    ],
)
def test_values_and_places_of_a_dimension_are_inverse(dimension):
    values = [dimension.value(unit) for unit in np.linspace(0, 1, 101)]
    assert [dimension.value(dimension.unit(value)) for value in values] == values
    if dimension.choices:
        assert set(values) == set(dimension.choices)
        counts = [values.count(choice) for choice in dimension.choices]
        assert max(counts) - min(counts) <= 1
        return
    assert (values[0], values[-1]) == (dimension.low, dimension.high)
    assert values == sorted(values)
    assert dimension.value(dimension.unit(dimension.high * 2)) == dimension.high
    if dimension.whole:
        assert all(isinstance(value, int) for value in values)


@pytest.mark.parametrize(
    ("dimension", "value", "nearby"),
    [
        (Dimension("a", 1e-5, 1.0, "log"), 1e-3, {8e-4, 1.25e-3}),
        (Dimension("a", 1e-5, 1.0, "log"), 1.0, {0.8}),  # at the end only the other way is open
        (Dimension("a", 0.8, 0.999, "near_one"), 0.99, {0.992, 0.9875}),
        (Dimension("a", 4.0, 64.0, "power_of_two", whole=True), 16, {8, 32}),
        (Dimension("a", 1.0, 20.0, "log", whole=True), 2, {1, 3}),
        (Dimension("a", -1.0, 1.0), 0.0, {-0.2, 0.2}),
        (Dimension("a", choices=(1, 2, 3)), 2, {1, 3}),
        (Dimension("a", choices=(1, 2, 3)), 3, {2}),
    ],
)
def test_a_small_change_is_a_neighbour_in_bounds(dimension, value, nearby):
    found = {dimension.changed(value, random.Random(seed)) for seed in range(30)}
    assert sorted(found) == pytest.approx(sorted(nearby))


def test_discounts_are_spread_by_their_distance_from_one():
    dimension = Dimension("gamma", 0.9, 0.999, "near_one")
    assert dimension.value(0.5) == pytest.approx(0.99)


def test_features_tell_choices_apart_by_one_step():
    space = Space((Dimension("a", 0, 1), Dimension("b", choices=(1, 2, 3)), Dimension("c", choices=(True, False))))
    found = space.features(np.stack([space.point({"a": 0.25, "b": b, "c": c}) for b in (1, 2, 3) for c in (True, False)]))
    assert found.shape == (6, 5)
    distances = np.linalg.norm(found[:, None] - found[None], axis=-1)
    assert distances[0, [1, 2, 4]] == pytest.approx(1.0)


@pytest.mark.parametrize("algorithm", sorted(algorithm_names()))
def test_every_algorithm_comes_with_a_space_that_includes_its_preset(algorithm):
    env = "pendulum" if algorithm in ("sac", "td3", "xqc") else "cartpole"
    base = settings_to_dict(make_settings(env, {"algorithm": algorithm}))
    space = default_space(base)
    assert {"total_steps", "learning_rate", "gamma"} <= set(space.names)
    assert len(space.names) >= 7
    values = space.values(space.point(base))
    for name, value in values.items():
        if isinstance(value, float):
            assert value == pytest.approx(base[name], rel=2e-3, abs=1e-5), name  # no entropy bonus: next to none
        else:
            assert value == base[name], name


def test_a_space_is_read_back_as_it_was_written(tmp_path):
    base = settings_to_dict(make_settings("cartpole", {}))
    space = default_space(base)
    (tmp_path / "space.toml").write_text(space.to_toml())
    again = read_space(tmp_path / "space.toml", base)
    precise = Space(
        (Dimension("total_steps", 1_000_001.0, 1_234_567.0, "log", whole=True), Dimension("gamma", 0.1234567, 0.999))
    )
    (tmp_path / "precise.toml").write_text(precise.to_toml())
    assert read_space(tmp_path / "precise.toml", base) == precise
    assert sorted(again.names) == sorted(space.names)
    assert {d.name: d for d in again.dimensions} == {d.name: d for d in space.dimensions}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat = [1.0]", "Did you mean learning_rate"),
        ("learning_rate = 1.0", "learning_rate in .* needs a range"),
        ("learning_rate = { low = 1.0 }", "needs low and high"),
        ("learning_rate = { low = 1.0, high = 0.1 }", "low must be less than high"),
        ('learning_rate = { low = 0.0, high = 0.1, scale = "log" }', "low must be above 0"),
        ('gamma = { low = 0.5, high = 1.0, scale = "near_one" }', "high below 1"),
        ("gamma = { low = 0.5, high = 1.5 }", "gamma in .* must be from 0 to 1"),
        ('gamma = { low = 0.5, high = 0.9, scale = "logg" }', "scale of gamma"),
        ("gamma = { low = 0.5, high = 0.9, step = 1 }", "a range takes low, high and scale"),
        ("optimizer = ['adam', 'sgd']", "optimizer in .* must be one of"),
        ("optimizer = { low = 1, high = 2 }", "is not a number: give a list of choices"),
        ("seed = [1, 2]", "seed in .* is the same for all runs"),
        ("gamma = [0.9, 0.9]", "the same choice twice"),
        ("gamma = [0.9]", "needs a range"),
        ("policy = ['mlp', 'net.py:Net']", "names code of your own"),
        ("unsafe = [true, false]", "unsafe in .* is the same for all runs"),
        ("learning_rate = { times = 2 }", "a range takes low, high and scale"),
        ("", "nothing to search"),
        ("= 3", "not a TOML file"),
    ],
)
def test_a_space_that_does_not_fit_is_refused(tmp_path, text, message):
    (tmp_path / "space.toml").write_text(text)
    with pytest.raises(HurtleError, match=message):
        read_space(tmp_path / "space.toml", settings_to_dict(make_settings("cartpole", {})))


# Models


def test_the_gaussian_process_equals_its_formulas():
    rng = np.random.default_rng(0)
    x, y, at = rng.random((20, 3)), rng.normal(size=20), rng.random((7, 3))
    model = GaussianProcess(x, y)

    def kernel(a, b):
        d = math.sqrt(5 * sum(((p - q) / length) ** 2 for p, q, length in zip(a, b, model._lengths, strict=True)))
        return (1 + d + d * d / 3) * math.exp(-d)

    inner = np.array([[kernel(a, b) for b in x] for a in x]) + (model._noise + 1e-8) * np.eye(20)
    across = np.array([[kernel(a, b) for b in x] for a in at])
    scaled = (y - y.mean()) / y.std()
    mean, deviation = model.predict(at)
    np.testing.assert_allclose(mean, y.mean() + y.std() * across @ np.linalg.inv(inner) @ scaled, rtol=1e-6, atol=1e-8)
    variance = 1 - np.einsum("ij,jk,ik->i", across, np.linalg.inv(inner), across)
    np.testing.assert_allclose(deviation, y.std() * np.sqrt(variance), rtol=1e-5)


def test_the_gaussian_process_learns_which_features_matter():
    rng = np.random.default_rng(1)
    x = rng.random((60, 4))
    y = np.sin(5 * x[:, 0]) + 0.05 * rng.normal(size=60)
    model = GaussianProcess(x, y)
    assert model._lengths[0] == min(model._lengths)
    at = rng.random((40, 4))
    assert np.corrcoef(model.predict(at)[0], np.sin(5 * at[:, 0]))[0, 1] > 0.95
    assert GaussianProcess(x, np.ones(60)).predict(at)[0] == pytest.approx(1.0)  # no variance at all


def test_expected_improvement_equals_an_average_of_samples():
    rng = np.random.default_rng(0)
    mean, deviation = np.array([-1.0, 0.2, 2.0]), np.array([0.5, 1.0, 0.1])
    samples = mean + deviation * rng.normal(size=(400_000, 3))
    np.testing.assert_allclose(expected_improvement(mean, deviation, 0.5), np.maximum(samples - 0.5, 0).mean(0), atol=3e-3)


def test_normal_scores_depend_on_ranks_alone():
    found = normal_scores([trial(0, 3.0), trial(1, -1e9), trial(2, 3.0), trial(3, state="failed"), trial(4, 5.0)])
    assert found[0] == found[2]
    assert found[3] < found[1] < found[0] < found[4]
    assert found[4] == -found[3]


def test_the_cost_aware_search_finds_the_peak_with_fewer_trials_than_chance():
    def run(search_class, seed, trials=30):
        search, tried = search_class(LINE, seed, lambda values: True), []
        for number in range(trials):
            values, _ = search.suggest(number, tried)
            far = math.log10(values["learning_rate"] / 3e-3) ** 2 + 4 * math.log10((1 - values["gamma"]) / 0.01) ** 2
            tried.append(trial(number, -far, 1.0 + number % 3, values))
        return max(entry.score for entry in tried)

    ours, chance = [[run(kind, seed) for seed in range(5)] for kind in (CostAwareSearch, RandomSearch)]
    assert np.median(ours) > 0.2 * np.median(chance)  # both negative: the distance is a fifth
    assert min(ours) > np.median(chance)


def test_the_cost_aware_search_avoids_what_fails_and_what_takes_too_long():
    def failing(values):
        return values["learning_rate"] > 1e-2

    search, tried = CostAwareSearch(LINE, 0, lambda values: True, most_seconds=20.0), []
    for number in range(40):
        values, _ = search.suggest(number, tried)
        cost = 100.0 ** LINE.point(values)[1]
        state = "failed" if failing(values) else "finished"
        tried.append(trial(number, cost if state == "finished" else math.nan, cost, values, state=state))
    late = tried[20:]
    assert sum(entry.state == "failed" for entry in late) <= 5
    assert sum(entry.seconds > 40 for entry in late) <= 5


def test_a_failed_trial_without_seconds_leaves_the_search_as_it_is():
    rng = np.random.default_rng(0)
    tried = [trial(k, -float(np.square(p - 0.4).sum()), 1.0 + k, LINE.values(p)) for k, p in enumerate(rng.random((20, 2)))]
    broken = trial(20, seconds=math.nan, values=LINE.values([0.9, 0.9]), state="failed")
    for number in (21, 22):
        values, origin = CostAwareSearch(LINE, 0, lambda values: True, most_seconds=60.0).suggest(number, [*tried, broken])
        assert origin == "search"
        assert np.abs(LINE.point(values) - 0.4).max() < 0.35  # not just any change of a trial on the front


def test_the_best_trial_stays_known_however_many_follow(monkeypatch):
    monkeypatch.setattr(cost_aware, "MOST_POINTS", 12)
    best = trial(0, 100.0, 1.0, LINE.values([0.2, 0.8]))
    later = [trial(k, float(k % 5), 5.0, LINE.values([k / 40, k / 40])) for k in range(1, 31)]
    seen = []
    monkeypatch.setattr(CostAwareSearch, "_candidates", lambda self, rng, front: seen.append(front) or rng.random((64, 2)))
    CostAwareSearch(LINE, 0, lambda values: True).suggest(31, [best, *later])
    np.testing.assert_allclose(seen[0], [LINE.point(best.values)])


def test_searches_repeat_for_a_seed_and_respect_what_fits():
    fits = lambda values: values["gamma"] > 0.9  # noqa: E731
    tried = [trial(k, float(k), 1.0, LINE.values([k / 12, 0.5])) for k in range(12)]
    for kind in (RandomSearch, CostAwareSearch):
        first, second = (kind(LINE, 3, fits).suggest(12, tried) for _ in range(2))
        assert first == second
        assert first[0]["gamma"] > 0.9
        assert kind(LINE, 4, fits).suggest(12, tried) != first
        with pytest.raises(HurtleError, match="fits together"):
            kind(LINE, 3, lambda values: False).suggest(12, tried)


# Pruning, winners


def test_the_median_rule():
    steps = np.arange(1, 11) * 100.0
    others = [np.stack([steps, level * steps], 1) for level in (1, 2, 3, 4, 5)]
    assert falls_behind(np.array([[300.0, 899.0]]), others, 1000)
    assert not falls_behind(np.array([[300.0, 901.0]]), others, 1000)
    assert not falls_behind(np.array([[300.0, 901.0], [400.0, 0.0]]), others[:4], 1000)  # too few to compare with
    assert not falls_behind(np.array([[200.0, 0.0]]), others, 1000)  # too early
    assert not falls_behind(np.empty((0, 2)), others, 1000)
    short = [curve[:2] for curve in others]
    assert not falls_behind(np.array([[300.0, 0.0]]), short, 1000)  # none of them trained for so long


def test_finalists_are_the_best_and_the_baseline():
    few = [
        trial(0, 1.0, origin="baseline"),
        trial(1, 5.0, 9.0),
        trial(2, 5.0, 3.0),
        trial(3, 4.0),
        trial(4, 3.0),
        trial(5, 9.0),
    ]
    few[5] = trial(5, 9.0, state="pruned")
    values = [{"learning_rate": 10.0**-k, "gamma": 0.9} for k in range(1, 7)]
    few = [Trial(**{**vars(entry), "values": values[k]}) for k, entry in enumerate(few)]
    assert choose_finalists(LINE, few) == [2, 1, 3, 0]
    assert choose_finalists(LINE, []) == []


def test_the_winner_is_the_best_of_the_checks_over_common_seeds():
    trials = [trial(0, 1.0, 5.0, origin="baseline"), trial(1, 9.0, 4.0), trial(2, 8.0, 3.0)]
    checks = [trial(3, 2.0, checks=1, seed=7), trial(4, 3.0, checks=0, seed=7), trial(5, 3.0, checks=2, seed=7)]
    assert winner(trials).number == 1
    assert winner([*trials, *checks]).number == 2  # as good as the baseline, and faster
    late = [trial(6, 100.0, checks=1, seed=8)]  # the others have no such seed yet
    assert checked([*trials, *checks, *late])[1].estimate.value == 2.0
    failed = [trial(6, checks=2, seed=8, state="failed"), trial(7, 4.0, checks=0, seed=8), trial(8, 4.0, checks=1, seed=8)]
    found = checked([*trials, *checks, *failed])
    assert (found[2].estimate.value, found[2].failed, found[2].seeds) == (2.5, 1, 2)  # the failure counts as the worst score, 2
    assert (found[0].estimate.value, found[0].failed) == (3.5, 0)
    assert str(found[2]).endswith("over 2 fresh seeds, 1 of which failed")
    assert winner([]) is None


def test_a_finalist_that_fails_with_fresh_seeds_does_not_win():
    trials = [trial(0, 500.0, 5.0, origin="baseline"), trial(1, 500.0, 1.0)]  # a saturated score: failures change no IQM
    checks = [trial(2 + seed, 500.0, checks=0, seed=seed) for seed in range(5)]
    checks += [
        trial(10 + seed, 500.0 if seed else math.nan, checks=1, seed=seed, state="finished" if seed else "failed")
        for seed in range(5)
    ]
    assert winner([*trials, *checks]).number == 0


def test_the_front_has_no_trial_that_another_one_beats_in_both():
    rng = np.random.default_rng(0)
    trials = [trial(k, float(rng.integers(10)), float(rng.integers(1, 10))) for k in range(60)]
    front = pareto_front(trials)
    for entry in front:
        assert not any(
            other.score >= entry.score and other.seconds <= entry.seconds
            and (other.score, other.seconds) != (entry.score, entry.seconds) for other in trials
        )  # fmt: skip
    for other in trials:
        assert any(entry.score >= other.score and entry.seconds <= other.seconds for entry in front)


def test_importance_finds_the_setting_that_matters():
    rng = np.random.default_rng(0)
    space = Space((Dimension("a", 0, 1), Dimension("b", 0, 1), Dimension("c", choices=(1, 2, 3))))
    trials = []
    for number in range(60):
        values = space.values(rng.random(3))
        score = 10 * values["a"] + 3 * (values["c"] == 2)
        trials.append(trial(number, score, 1 + 5 * values["b"], values))
    found = importance(space, trials)
    assert next(iter(found)) == "a"
    assert found["a"] > 0.6 > found["c"] > found["b"]
    assert found["b"] < 0.05
    assert next(iter(importance(space, trials, "seconds"))) == "b"
    assert importance(space, trials[:5]) == {}


# The journal


def test_the_journal_is_read_back_and_survives_a_line_that_was_cut_off(tmp_path):
    file = tmp_path / "trials.jsonl"
    journal = Journal(file)
    for number in range(3):
        journal.begin(Trial(number, {"hidden_sizes": (64, 64), "gamma": 0.9}, seed=number), elapsed=float(number))
    journal.end(trial(0, 5.0, values={"hidden_sizes": (64, 64)}), elapsed=7.0)
    journal.end(trial(1, state="failed", error="it broke"), elapsed=8.0)
    again = Journal(file)
    assert again.trials[0] == journal.trials[0]
    assert again.trials[0].values["hidden_sizes"] == (64, 64)
    assert [entry.state for entry in again.select(lambda entry: True)] == ["finished", "failed", "running"]
    assert math.isnan(again.trials[1].score)
    assert again.elapsed == 8.0
    with pytest.raises(HurtleError, match="Trial 0 is not running"):
        again.end(trial(0, 6.0), 9.0)
    file.write_bytes(file.read_bytes()[:-30])  # the end of trial 1 is lost
    torn = Journal(file)
    assert torn.trials[1].state == "running"
    torn.end(trial(1, 2.0), 9.0)  # on a line of its own
    assert Journal(file).trials[1].score == 2.0
    assert Journal(file).trials[2].state == "running"
