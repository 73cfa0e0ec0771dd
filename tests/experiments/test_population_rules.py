"""The rules of a population: ranges, changes in bounds, who copies whom, the lineage and the schedule. Nothing is trained."""

import json
import math

import pytest

from hurtle.errors import HurtleError
from hurtle.experiments.populations.lineage import Entry, Lineage, Stretch
from hurtle.experiments.populations.rules import Result, choose_sources, first_generation, next_generation
from hurtle.experiments.populations.search_space import as_written, make_space
from hurtle.experiments.space import Dimension, Space
from hurtle.tracking.toml_text import to_toml

NAN = math.nan


def test_ranges_are_read_from_names_dicts_and_files(tmp_path):
    assert make_space(None, "ppo") == {
        "learning_rate": Dimension("learning_rate", 1e-5, 1e-2, "log"),
        "entropy_coef": Dimension("entropy_coef", 1e-4, 0.1, "log"),
        "clip_range": Dimension("clip_range", 0.05, 0.5, "log"),
    }
    assert list(make_space(None, "dqn")) == ["learning_rate"]
    assert list(make_space(None, "ppo", fixed={"clip_range"})) == ["learning_rate", "entropy_coef"]
    assert make_space("gamma, num_epochs", "ppo") == {
        "gamma": Dimension("gamma", 0.9, 0.999, "near_one"),
        "num_epochs": Dimension("num_epochs", 1.0, 20.0, "log", whole=True),
    }
    wide = {
        "learning_rate": {"low": 1e-4, "high": 1e-2, "scale": "linear"},
        "clip_range": {"low": 0.1, "high": 0.3},
        "target_kl": {"low": 0.01, "high": 0.05},
        "minibatch_size": [32, 64],
        "shuffle": [True, False],
    }
    found = make_space(wide, "ppo")
    assert found["learning_rate"].scale == "linear"
    assert found["clip_range"] == Dimension("clip_range", 0.1, 0.3, "linear")  # less than a factor of ten
    assert found["minibatch_size"].choices == (32, 64)
    assert found["shuffle"].choices == (True, False)
    file = tmp_path / "ranges.toml"
    file.write_text(Space(tuple(found.values())).to_toml())
    assert make_space(file, "ppo") == found
    file.write_text(to_toml({"search": as_written(found)}).replace("[search]\n", ""))
    assert make_space(str(file), "ppo") == found


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({"learning_rat": [1, 2]}, "No setting learning_rat to search. Did you mean learning_rate"),
        ({"num_envs": [1, 8]}, "num_envs cannot be searched by a population: only settings of the algorithm change in mid-run"),
        ({"hidden_sizes": [[8], [16]]}, "hidden_sizes cannot be searched.*networks stay as they are"),
        ({"optimizer": ["adam", "adamw"]}, "moments of one optimizer mean nothing to another"),
        ({"num_steps": [8, 16]}, "members must take the same steps"),
        ({"learning_rate": {"low": 1e-2, "high": 1e-4}}, "low must be less than high, got 0.01 and 0.0001"),
        ({"learning_rate": {"low": -1, "high": 1}}, "learning_rate to search must be more than 0, got -1"),
        ({"learning_rate": {"low": 1e-4}}, "needs low and high"),
        ({"learning_rate": {"low": 1e-4, "hihg": 1}}, "has hihg: a range takes low, high and scale"),
        (
            {"learning_rate": {"low": 1e-4, "high": 1, "scale": "lienar"}},
            "one of linear, log, .*, got 'lienar'",
        ),
        ({"entropy_coef": {"low": 0, "high": 1, "scale": "log"}}, "on a log scale, low must be above 0"),
        ({"gamma": {"low": 0.5, "high": 1.0, "scale": "near_one"}}, "on a near_one scale, high below 1"),
        ({"num_epochs": [4]}, "needs a range, .*, or a list of choices"),
        ({"num_epochs": [4, 4, 8]}, "the same choice twice"),
        ({"gamma": 0.9}, "needs a range, .*, or a list of choices"),
        (["vtrace"], "vtrace has no range of its own"),
        ({}, "at least one setting"),
        ("nowhere.toml", "nowhere.toml could not be read"),
    ],
)
def test_a_search_that_does_not_fit_is_explained(search, message):
    with pytest.raises(HurtleError, match=message):
        make_space(search, "ppo")


def test_settings_that_shape_the_network_or_the_replay_buffer_are_refused():
    for name, why in (("dueling", "shapes the network"), ("capacity", "replay buffer"), ("priority_alpha", "replay buffer")):
        with pytest.raises(HurtleError, match=f"{name} cannot be searched by a population: .*{why}"):
            make_space({name: [1, 2]}, "dqn")
    assert make_space({"priority_alpha": {"low": 0.1, "high": 1.0}}, "ppo")
    with pytest.raises(HurtleError, match="learning_rate is searched by the population: do not give it a value"):
        make_space(["learning_rate"], "ppo", fixed=["learning_rate"])


def results(*scores, failed=()):
    return [Result(100, score, "broke" if member in failed else "") for member, score in enumerate(scores)]


@pytest.mark.parametrize(
    ("found", "share", "copiers", "sources"),
    [
        (results(5, 1, 8, 3, 7, 2, 6, 4), 0.25, {1, 5}, {2, 4}),
        (results(5, 1, 8, 3, 7, 2, 6, 4), 0.5, {1, 3, 5, 7}, {0, 2, 4, 6}),
        (results(5, 1, 8, 3, 7, 2, 6, 4), 0.01, {1}, {2}),
        (results(1, 2), 0.25, {0}, {1}),
        (results(1, 2, 3), 0.5, {0}, {2}),
        (results(2, 2, 2, 2), 0.25, set(), set()),  # nobody is better
        (results(NAN, 1, 2, 3), 0.25, {1}, {3}),  # a score that is not known is left alone
        (results(NAN, NAN, NAN, NAN), 0.25, set(), set()),
        (results(5, 1, 8, 3, 7, 2, 6, NAN, failed=[7]), 0.25, {1, 7}, {2, 4}),  # a failure is one of the worst
        (results(NAN, NAN, 8, 3, 7, 2, 6, NAN, failed=[0, 1, 7]), 0.25, {0, 1, 7}, {2, 4}),
        (results(NAN, NAN, NAN, 3, failed=[0, 1, 2]), 0.25, {0, 1, 2}, {3}),
        (results(NAN, NAN, NAN, failed=[0]), 0.25, {0}, {1, 2}),  # better any that runs
    ],
)
def test_truncation_selection(found, share, copiers, sources):
    seen = set()
    for seed in range(30):
        chosen = choose_sources(found, share, 3, seed)
        assert chosen.keys() == copiers
        seen |= set(chosen.values())
    assert seen == sources


def test_a_copy_changes_the_settings_of_whom_it_copies_and_all_else_stays():
    space = make_space({"learning_rate": {"low": 1e-4, "high": 1e-2}, "num_epochs": [1, 2, 4, 8]}, "ppo")
    start = first_generation(space, 4, seed=7)
    assert first_generation(space, 4, seed=7) == start
    assert first_generation(space, 4, seed=8) != start
    first = next_generation(start, results(4, 3, 2, 1), space, 0.25, seed=7)
    assert [entry.copied_from for entry in first] == [None, None, None, 0]
    assert [(entry.generation, entry.member, entry.steps, entry.score) for entry in first][3] == (1, 3, 100, 1)
    assert [entry.settings for entry in first[:3]] == [entry.settings for entry in start[:3]]
    source, copy = start[0].settings, first[3].settings
    assert copy["learning_rate"] / source["learning_rate"] in (pytest.approx(0.8, rel=1e-3), pytest.approx(1.25, rel=1e-3))
    choices = (1, 2, 4, 8)
    assert abs(choices.index(copy["num_epochs"]) - choices.index(source["num_epochs"])) == 1
    assert next_generation(start, results(4, 3, 2, 1), space, 0.25, seed=7) == first
    last = next_generation(start, results(4, 3, 2, 1), space, 0.25, seed=7, is_last=True)
    assert [entry.copied_from for entry in last] == [None] * 4


def entry(generation, member, steps, score, copied_from, rate):
    return Entry(generation, member, steps, score, copied_from, "", {"learning_rate": rate})


def three_members(folder):
    """Member 2 ends best; it copied 0 at generation 2, which had copied 1 at generation 1."""
    lineage = Lineage(folder, 3)
    lineage.append([entry(0, 0, 0, NAN, None, 0.1), entry(0, 1, 0, NAN, None, 0.2), entry(0, 2, 0, NAN, None, 0.3)])
    lineage.append([entry(1, 0, 100, 1.0, 1, 0.25), entry(1, 1, 110, 3.0, None, 0.2), entry(1, 2, 100, 2.0, None, 0.3)])
    lineage.append([entry(2, 0, 200, 5.0, None, 0.25), entry(2, 1, 200, 4.0, None, 0.2), entry(2, 2, 200, 1.0, 0, 0.2)])
    lineage.append([entry(3, 0, 300, 6.0, None, 0.25), entry(3, 1, 300, 5.0, None, 0.2), entry(3, 2, 300, 7.0, None, 0.2)])
    return lineage


def test_the_schedule_follows_who_trained_the_weights(tmp_path):
    lineage = three_members(tmp_path)
    assert lineage.ancestors(2) == [1, 0, 2]
    assert lineage.schedule(2) == [
        Stretch(0, 110, 1, {"learning_rate": 0.2}),
        Stretch(110, 200, 0, {"learning_rate": 0.25}),
        Stretch(200, 300, 2, {"learning_rate": 0.2}),
    ]
    assert lineage.schedule(1) == [Stretch(0, 300, 1, {"learning_rate": 0.2})]  # equal settings are joined


def test_a_lineage_is_read_as_it_was_written_without_a_torn_end(tmp_path):
    lineage = three_members(tmp_path)
    text = lineage.file.read_text()
    assert json.loads(text.splitlines()[0])["score"] is None
    again = Lineage.read(tmp_path, 3)
    assert again.generations[1:] == lineage.generations[1:]
    assert math.isnan(again.generations[0][2].score)
    lines = text.splitlines(keepends=True)
    for torn in (lines[9][:20], "".join(lines[9:11]), "".join(lines[9:11]) + lines[11][:30]):
        lineage.file.write_text("".join(lines[:9]) + torn)
        assert len(Lineage.read(tmp_path, 3).generations) == 3
        assert lineage.file.read_text() == "".join(lines[:9])
    lineage.file.write_text("".join([*lines[:4], "{}\n", *lines[5:]]))
    with pytest.raises(HurtleError, match=r"lineage.jsonl is damaged in line 5"):
        Lineage.read(tmp_path, 3)
    lineage.file.write_text("".join([*lines[:4], *lines[5:]]))
    with pytest.raises(HurtleError, match="line 5: another member was expected"):
        Lineage.read(tmp_path, 3)
    with pytest.raises(HurtleError, match="could not be read"):
        Lineage.read(tmp_path / "nowhere", 3)
