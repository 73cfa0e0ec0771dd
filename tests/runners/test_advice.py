"""What is said about metrics that look wrong: when, how often, and never about good ones."""

import pytest

import hurtle
from hurtle.runners.advice import FAR, MOST, STILL, WINDOW, Adviser

GOOD = {"approx_kl": 0.01, "clip_range": 0.2, "entropy": 1.0, "explained_variance": 0.8}


def said(*phases, has_choices=True, actions=1, total=1000):
    """What an adviser says; each phase is metrics for an equal part of the run."""
    adviser, found = Adviser(total, has_choices, actions), []
    for step in range(total):
        metrics = {**GOOD, **phases[step * len(phases) // total], "steps": step}
        found.append(adviser.look({name: value for name, value in metrics.items() if value is not None}))
    return [text for text in found if text]


def test_good_metrics_need_no_words():
    assert said(GOOD) == []
    assert said({"entropy": 2.0}, {"entropy": -2.0}, has_choices=False) == []  # a Gaussian that narrows


@pytest.mark.parametrize(
    ("phases", "word"),
    [
        ([{"approx_kl": STILL / 2}], "hardly moves"),
        ([{"approx_kl": 2 * FAR}], "moves far"),
        ([{}] + 2 * [{"entropy": 0.01}] + 6 * [{}], "stopped exploring"),
        ([{"explained_variance": -0.5}], "say little"),
    ],
)
def test_each_complaint_is_made_once(phases, word):
    (text,) = said(*phases)
    assert word in text
    assert "try " in text


def test_actions_that_become_more_random():
    assert "more random" in said({}, {"entropy": 4.0}, has_choices=False, actions=3)[0]
    assert said({}, {"entropy": 4.0}, has_choices=False, actions=8) == []
    assert said({}, {"entropy": 4.0}) == []


def test_what_is_normal_late_in_a_run_or_early_is_not_wrong():
    late = [{}, {}, {"approx_kl": 0.0}, {"entropy": 0.0}]  # an annealed learning rate; a policy that has learned
    assert said(*late) == []
    assert said({"explained_variance": 0.0}, *[{}] * 9) == []  # nothing is known yet


def test_learners_without_a_clipped_loss_are_not_judged_by_their_kl():
    assert said({"approx_kl": 0.0, "clip_range": None}) == []
    assert said({"approx_kl": float("nan"), "explained_variance": float("nan"), "entropy": float("nan")}) == []


def test_few_updates_say_nothing_and_there_are_few_words():
    adviser = Adviser(1000, has_choices=True, actions=1)
    assert not any(adviser.look({**GOOD, "approx_kl": 1.0, "steps": 1}) for _ in range(WINDOW - 1))
    assert "moves far" in adviser.look({**GOOD, "approx_kl": 1.0, "steps": 1})
    bad = {"approx_kl": 1.0, "explained_variance": -1.0, "entropy": 0.0}
    everything = said({"approx_kl": 0.0}, bad, bad, {"approx_kl": 1.0}, {"entropy": 99.0})
    assert len(everything) == MOST == len(set(everything))


def train(tmp_path, capsys, **words):
    quick = {"num_envs": 4, "num_steps": 16, "minibatch_size": 64, "total_steps": 64 * 2 * WINDOW, "eval_episodes": 1}
    hurtle.train("cartpole", **quick, **words, learning_rate=1e-7, trackers=(), runs=tmp_path, curve=False)
    return "".join(capsys.readouterr())


def test_a_run_says_so(tmp_path, capsys):
    output = train(tmp_path, capsys, progress="plain")
    assert output.count("advice: the policy hardly moves (KL ") == 1
    assert "advice" not in train(tmp_path, capsys, progress="quiet")
