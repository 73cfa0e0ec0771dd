"""Env definitions: parameters, State, spaces, signatures; and the errors for wrong ones."""

import numpy as np
import pytest
from gymnasium import spaces

from hurtle.envs.snake import Snake
from hurtle.envs.squared import Squared
from hurtle.errors import EnvDefinitionError, HurtleError, UnknownNameError
from hurtle.native import Box, Discrete, Env, EnvSpec, MultiDiscrete, bool_, float32, int8, int16, uint8


class Good(Env):
    """The first line of a docstring.

    The rest of it.
    """

    observation_space = Box(-1.0, 1.0, (2,))
    action_space = Discrete(3)
    max_steps = 10
    metrics = ("score",)

    gravity: float = 9.8
    height: int = 4
    width: int = 5
    wet: bool = False
    not_a_parameter = 3

    class State:
        x: float32
        score: int16
        grid: uint8["height", "width"]
        flags: bool_["width"]
        length: float32 = 0.5

    def reset(self, state, rng):
        state.x = 0.0

    def step(self, state, action, rng):
        return 1.0, False

    def observe(self, state, obs):
        obs[0] = state.x


def variant(**changes):
    """`Good` with other attributes; None removes one."""
    members = {**vars(Good), **changes}
    kept = {name: value for name, value in members.items() if value is not None and name not in ("__dict__", "__weakref__")}
    return type("Variant", (Env,), kept)


def refused(env, *parts):
    with pytest.raises(EnvDefinitionError) as caught:
        EnvSpec.of(env)
    for part in parts:
        assert part in str(caught.value)
    return str(caught.value)


# Valid definitions ---------------------------------------------------------------------------------------------------


def test_parameters_are_the_annotated_attributes_with_a_default():
    known = Good.parameters()
    assert known == {"max_steps": 10, "gravity": 9.8, "height": 4, "width": 5, "wet": False}


def test_parameters_are_set_and_converted():
    env = Good(gravity=2, height=np.int64(7), wet=np.True_, max_steps=3)
    assert (env.gravity, env.height, env.wet, env.max_steps) == (2.0, 7, True, 3)
    assert type(env.gravity) is float
    assert type(env.height) is int
    assert type(env.wet) is bool
    assert Good().gravity == 9.8
    assert Good(max_steps=5).max_steps == 5
    assert variant(max_steps=None)(max_steps=5).max_steps == 5


def test_truncation_can_be_switched_off():
    assert EnvSpec.of(Good(max_steps=None)).max_steps == 0


def test_repr_shows_what_differs_from_the_defaults():
    assert repr(Good()) == "Good()"
    assert repr(Good(gravity=1.5, max_steps=3)) == "Good(max_steps=3, gravity=1.5)"


def test_repr_leaves_out_derived_settings():
    assert repr(Squared()) == "Squared()"


def test_spec_describes_the_env():
    spec = EnvSpec.of(Good(height=2))
    assert spec.name == "Good"
    assert spec.description == "The first line of a docstring."
    assert spec.fields["grid"].shape == (2, 5)
    assert spec.runtime_parameters == {"length": 0.5}
    assert (spec.obs_shape, spec.obs_size, spec.action_shape, spec.action_dtype) == ((2,), 2, (), np.int64)
    assert (spec.has_mask, spec.has_present, spec.max_steps) == (False, False, 10)
    assert EnvSpec.of(variant(max_steps=None)).max_steps == 0


def test_spec_of_several_agents():
    spec = EnvSpec.of(Snake(num_agents=3, vision=2))
    assert (spec.num_agents, spec.agents_shape, spec.obs_shape) == (3, (3,), (3, 5, 5, 5))
    assert spec.obs_size == 375
    assert spec.has_present
    assert spec.record["_present"].shape == (3,)


def test_record_holds_the_engines_fields_first_and_bool_arrays_as_bytes():
    record = EnvSpec.of(Good).record
    assert record.names == ("_rng", "_steps", "_return", "x", "score", "grid", "flags", "length")
    assert record["flags"].base == np.uint8
    assert record.isalignedstruct


def test_derived_envs_inherit_parameters_and_fields():
    class Longer(Good):
        gravity: float = 1.0
        extra: int = 2

        class State(Good.State):
            more: int8["extra"]

    assert list(Longer.parameters()) == ["max_steps", "gravity", "height", "width", "wet", "extra"]
    assert Longer.parameters()["gravity"] == 1.0
    spec = EnvSpec.of(Longer)
    assert list(spec.fields) == ["x", "score", "grid", "flags", "length", "more"]
    assert spec.fields["more"].shape == (2,)
    assert spec.runtime_parameters == {"length": 0.5}


def test_postponed_annotations(write_module):
    module = write_module(
        "from __future__ import annotations\n"
        "from hurtle.native import Box, Discrete, Env, float32, uint8\n"
        "class Later(Env):\n"
        "    observation_space = Box(-1.0, 1.0, (1,))\n"
        "    action_space = Discrete(2)\n"
        "    size: int = 3\n"
        "    class State:\n"
        "        x: float32\n"
        '        grid: uint8["size", 2]\n'
        "    def reset(self, state, rng): state.x = 0.0\n"
        "    def step(self, state, action, rng): return 0.0, False\n"
        "    def observe(self, state, obs): obs[0] = state.x\n"
    )
    spec = EnvSpec.of(module.Later(size=6))
    assert spec.fields["grid"].shape == (6, 2)
    assert list(module.Later.parameters()) == ["max_steps", "size"]


# Parameters ----------------------------------------------------------------------------------------------------------


def test_unknown_parameter_suggests_the_nearest():
    with pytest.raises(UnknownNameError, match=r"Good has no parameter 'gravty'. Did you mean gravity\?"):
        Good(gravty=1.0)
    with pytest.raises(UnknownNameError, match="annotated class attribute"):
        Good(not_a_parameter=4)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"height": 2.5}, "Good.height takes an int, got 2.5"),
        ({"height": True}, "Good.height takes an int, got True"),
        ({"height": "tall"}, "Good.height takes an int, got 'tall'"),
        ({"height": None}, "Good.height takes an int, got None"),
        ({"height": float("nan")}, "Good.height takes an int, got nan"),
        ({"max_steps": "many"}, "Good.max_steps takes an int, got 'many'"),
        ({"gravity": "strong"}, "Good.gravity takes a float, got 'strong'"),
        ({"gravity": None}, "Good.gravity takes a float, got None"),
        ({"wet": 1}, "Good.wet takes a bool, got 1"),
    ],
)
def test_parameter_of_the_wrong_type(parameters, message):
    with pytest.raises(EnvDefinitionError) as caught:
        Good(**parameters)
    assert message in str(caught.value)


def test_derived_settings_cannot_be_set():
    """Squared computes max_steps from its other parameters."""
    with pytest.raises(HurtleError, match="max_steps"):
        Squared(max_steps=5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_agents": 0}, "Variant.num_agents must be an int of at least 1, got 0"),
        ({"max_steps": 0}, "Variant.max_steps must be None or an int of at least 1, got 0"),
        ({"max_steps": 10.5}, "Variant.max_steps must be None or an int of at least 1, got 10.5"),
    ],
)
def test_engine_settings_out_of_range(changes, message):
    refused(variant(**changes), message)


# Methods -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "signature"),
    [("reset", "(self, state, rng)"), ("step", "(self, state, action, rng)"), ("observe", "(self, state, obs)")],
)
def test_missing_method_says_what_to_write(name, signature):
    refused(variant(**{name: None}), f"Variant has no method {name!r}. Write: def {name}{signature}")


@pytest.mark.parametrize(("name", "near"), [("observe", "observ"), ("reset", "rest"), ("step", "stepp")])
def test_nearly_right_method_name_is_pointed_out(name, near):
    refused(variant(**{name: None, near: getattr(Good, name)}), f"has no method {name!r} (Variant has {near!r}: is that it?)")


def test_wrong_number_of_arguments_names_the_place():
    def step(self, state, action):
        return 1.0, False

    line = step.__code__.co_firstlineno
    refused(
        variant(step=step),
        "Variant.step takes (state, action); expected def step(self, state, action, rng)",
        f"({__file__}:{line})",
    )


def test_random_generator_must_be_called_rng():
    def reset(self, state, random):
        state.x = 0.0

    refused(variant(reset=reset), "Variant.reset must call its argument `rng`: def reset(self, state, rng)")


def test_step_of_several_agents_has_another_signature():
    wanted = "expected def step(self, state, action, reward, terminated, rng) (num_agents = 2)"
    refused(variant(num_agents=2), "Variant.step takes (state, action, rng)", wanted)


def test_single_agent_with_the_signature_of_several():
    def step(self, state, action, reward, terminated, rng):
        return False

    refused(variant(step=step), "expected def step(self, state, action, rng) (num_agents = 1)")


@pytest.mark.parametrize("name", ["mask", "render", "present"])
def test_optional_methods_are_checked_too(name):
    refused(variant(**{name: lambda self: None}), f"Variant.{name} takes (); expected def {name}(self, state")


def test_present_needs_several_agents():
    refused(
        variant(present=lambda self, state, present: None), "Variant.present is for envs with several agents; num_agents is 1"
    )


def test_mask_needs_discrete_actions():
    refused(
        variant(mask=lambda self, state, mask: None, action_space=Box(-1.0, 1.0, (2,))),
        "Variant.mask needs a Discrete or MultiDiscrete action space, got Box",
    )


def test_only_native_envs():
    refused(dict, "dict is not a native env: derive it from hurtle.native.Env")


# State ---------------------------------------------------------------------------------------------------------------


def state_with(**annotations):
    return type("State", (), {"__annotations__": annotations})


def test_missing_state():
    refused(variant(State=None), "Variant has no State. Write: class State:")


@pytest.mark.parametrize("wrong", [float, np.float32, np.float64, int, "float33"])
def test_field_of_the_wrong_type(wrong):
    if isinstance(wrong, str):
        with pytest.raises((EnvDefinitionError, NameError), match="float33"):
            EnvSpec.of(variant(State=state_with(x=wrong), metrics=()))
    else:
        refused(variant(State=state_with(x=wrong), metrics=()), "Variant.State.x is annotated with", "uint8[10, 10]")


def test_underscores_belong_to_the_engine():
    refused(
        variant(State=state_with(_x=float32), metrics=()),
        "Variant.State._x: names with a leading underscore belong to the engine",
    )


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (uint8["hight"], "'hight' is not an attribute of the env. Did you mean height?"),
        (uint8["gravity"], "dimension 'gravity' must be an int of at least 1, got 9.8"),
        (uint8[0], "dimension 0 must be an int of at least 1"),
        (uint8[3, -1], "dimension -1 must be an int of at least 1"),
        (uint8["2 * hight"], "'hight' is not an attribute of the env. Did you mean height?"),
        (uint8["height - 100"], "dimension 'height - 100' must be an int of at least 1, got -"),
        (uint8["max(height, 3)"], "'max(height, 3)' may contain names of attributes, ints, +, -, * and //. For any"),
        (uint8["height // 0"], "compute it in a property of the env and name that"),
        (uint8["2 height"], "the dimension '2 height' may contain"),
    ],
)
def test_dimensions(kind, message):
    refused(variant(State=state_with(grid=kind), metrics=()), "Variant.State.grid: ", message)


def test_dimensions_are_computed_from_parameters():
    State = state_with(grid=uint8["height * height", "2 * (height + 1) // 3 - 1"])
    for height in (4, 7):
        spec = EnvSpec.of(variant(State=State, metrics=())(height=height))
        assert spec.fields["grid"].shape == (height * height, 2 * (height + 1) // 3 - 1)


@pytest.mark.parametrize(
    ("kind", "default", "message"),
    [
        (float32, [1.0, 2.0], "float32 is one number, got the default [1.0, 2.0]. For an array, write its shape: float32[2]."),
        (float32[3], [1.0, 2.0], "float32[3] takes one number, or an array of shape (3,), got the default [1.0, 2.0]."),
        (float32[2], [[1.0], [2.0, 3.0]], "float32[2] takes one number, or an array of shape (2,), got the default [[1.0], [2"),
        (int8, 300, "Variant.State.x holds int8, got 300."),
    ],
)
def test_defaults_have_the_shape_of_their_field(kind, default, message):
    State = state_with(x=kind)
    State.x = default
    refused(variant(State=State, metrics=()), "Variant.State.x", message)


def test_dimension_from_a_parameter_of_zero():
    refused(Good(height=0), "Good.State.grid: dimension 'height' must be an int of at least 1, got 0")


@pytest.mark.parametrize(("metric", "hint"), [("scor", "Did you mean score?"), ("grid", "is not a scalar field of State")])
def test_metrics_name_scalar_fields(metric, hint):
    refused(variant(metrics=(metric,)), f"Variant.metrics names {metric!r}", hint)


# Spaces --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (None, "Variant has no observation_space. Write: observation_space = Box"),
        (Discrete(3), "Variant.observation_space must be a Box, got Discrete(3)"),
        (spaces.Dict({"a": Discrete(2)}), "must be a Box, got Dict"),
        (spaces.Box(-1.0, 1.0, (2,), np.float64), "has dtype float64; supported: float32, uint8"),
        (spaces.Box(0, 9, (2,), np.int64), "has dtype int64; supported: float32, uint8"),
        (Box(0.0, 1.0, ()), "has no dimension; write Box(low, high, (1,))"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_observation_space(space, message):
    refused(variant(observation_space=space), message)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (None, "Variant has no action_space. Write: action_space = Discrete(2)"),
        (spaces.MultiBinary(3), "must be Discrete, MultiDiscrete (one-dimensional) or a float32 Box with a shape"),
        (MultiDiscrete([[2, 2], [3, 3]]), "must be Discrete, MultiDiscrete (one-dimensional)"),
        (spaces.Box(-1.0, 1.0, (2,), np.float64), "a float32 Box with a shape"),
        (Box(-1.0, 1.0, ()), "a float32 Box with a shape"),
    ],
)
def test_action_space(space, message):
    refused(variant(action_space=space), message)


@pytest.mark.parametrize(
    ("space", "shape", "dtype", "mask_size"),
    [
        (Discrete(7), (), np.int64, 7),
        (MultiDiscrete([2, 3]), (2,), np.int64, 5),
        (Box(-1.0, 1.0, (2, 2)), (2, 2), np.float32, None),
    ],
)
def test_action_spaces_that_work(space, shape, dtype, mask_size):
    spec = EnvSpec.of(variant(action_space=space))
    assert spec.action_shape == shape
    assert spec.action_dtype == dtype
    assert mask_size is None or spec.mask_size == mask_size


@pytest.mark.parametrize("dtype", [uint8, np.int8, np.int16, np.int32, np.float32])
def test_observation_dtypes_that_work(dtype):
    spec = EnvSpec.of(variant(observation_space=Box(0, 1, (3, 2), dtype)))
    assert spec.obs_size == 6


def test_spaces_may_depend_on_parameters():
    class Sized(Good):
        observation_space = property(lambda self: Box(0.0, 1.0, (self.height, self.width)))
        action_space = property(lambda self: Discrete(self.height))

    spec = EnvSpec.of(Sized(height=6))
    assert spec.obs_shape == (6, 5)
    assert spec.action_space.n == 6
