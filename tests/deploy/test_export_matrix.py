"""Every policy that can be trained is exported, and computes the same in every runtime as the run's torch policy does."""

import itertools
import random

import pytest
from export_helpers import (
    ACTIONS,
    MASKABLE,
    NETWORKS,
    OBSERVATIONS,
    assert_agrees,
    fits,
    own_module,
    random_env,
    train_tiny,
)

import hurtle
from hurtle.deploy.exported import ExportedPolicy
from hurtle.deploy.policy_file import read_policy_file

COVERING = [
    ("ppo", "tanh", "float32", "discrete", False),
    ("ppo", "relu", "uint8", "multi_discrete", True),
    ("a2c", "shared", "discrete", "multi_binary", True),
    ("ppo", "deep", "matrix", "squashed", False),
    ("a2c", "linear", "int8", "integer", False),
    ("a2c", "normalized", "single", "float64", False),
    ("ppo", "normalized", "float64", "beta", False),
    ("a2c", "cnn", "image", "gaussian", False),
    ("ppo", "structured", "mixed", "structured", False),
    ("a2c", "tanh", "floats", "structured", False),
    ("a2c", "mingru", "text", "squashed", False),
    ("ppo", "gru", "grid", "multi_discrete", True),
    ("ppo", "lstm", "multi_binary", "discrete", True),
    ("a2c", "module", "multi_discrete", "discrete", False),
    ("ppo", "module", "float32", "gaussian", False),
]
"""Algorithm, network, observations, actions, masks: each kind of each at least once."""
QUICK = ("cnn",)
"""One combination of each of these networks is not a slow test; the other files here export the other kinds."""
SLOW = 150
"""How many of the other 2,700 combinations the slow tests try; all of them take hours."""


def every_combination():
    for combination in itertools.product(("ppo", "a2c"), NETWORKS, OBSERVATIONS, ACTIONS, (False, True)):
        _, network, observation, action, masks = combination
        takes = network != "module" or action in ("discrete", "gaussian")
        if fits(network, observation) and takes and (action in MASKABLE or not masks) and combination not in COVERING:
            yield combination


def named(combinations, quick=()):
    """Parameters with their names; slow ones but for the first of each quick network."""
    found, left = [], set(quick)
    for each in combinations:
        is_slow = bool(quick) and each[1] not in left
        left.discard(each[1])
        name = "-".join([*each[:4], *["masks"] * each[4]])
        found.append(pytest.param(*each, id=name, marks=[pytest.mark.slow] * is_slow))
    return found


def check_combination(folder, algorithm, network, observation, action, masks):
    action_space, distribution = ACTIONS[action]
    settings = {**NETWORKS[network], "algorithm": algorithm}
    if observation == "image":
        settings["learning_rate"] = 0.001  # else the features reach thousands, and float32 has no 1e-5 left
    module = None
    if network == "module":
        module = own_module(OBSERVATIONS[observation], action_space)
        settings["policy"] = module
    else:
        settings["distribution"] = distribution
    run = train_tiny(folder, random_env(OBSERVATIONS[observation], action_space, masks), **settings)
    reference = hurtle.load(run, policy=module)
    for name, options in {"policy.onnx": {"outputs": ("action", "value", "heads")}, "policy.pt2": {}}.items():
        exported = hurtle.export(run, folder / name, policy=module, **options)
        assert exported.card.masked == masks
        file = read_policy_file(folder / name)
        for runtime in ExportedPolicy.runtimes_of(file):
            assert_agrees(
                hurtle.load(folder / name, runtime=runtime), reference, steps=3 if reference.module.is_recurrent else 1
            )


def test_the_selection_has_every_kind():
    for place, kinds in enumerate((("ppo", "a2c"), NETWORKS, OBSERVATIONS, ACTIONS, (False, True))):
        assert {combination[place] for combination in COVERING} == set(kinds)


@pytest.mark.parametrize(("algorithm", "network", "observation", "action", "masks"), named(COVERING, QUICK))
def test_an_exported_policy_is_the_trained_one(tmp_path, algorithm, network, observation, action, masks):
    check_combination(tmp_path, algorithm, network, observation, action, masks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "network", "observation", "action", "masks"), named(random.Random(0).sample(list(every_combination()), SLOW))
)
def test_every_exported_policy_is_the_trained_one(tmp_path, algorithm, network, observation, action, masks):
    check_combination(tmp_path, algorithm, network, observation, action, masks)
