"""ONNX files of others, with weights elsewhere, with operations or sizes that no policy has: refused, and never run."""

import sys

import numpy as np
import pytest
from file_helpers import assert_refused, onnx, onnx_with, set_to, use

from hurtle.deploy.card import MAX_NUMBERS
from hurtle.deploy.onnx_file import KEY, read_onnx
from hurtle.errors import HurtleError, PolicyFileError

make, INT64, FLOAT = onnx.helper, onnx.TensorProto.INT64, onnx.TensorProto.FLOAT


def test_an_onnx_model_of_somebody_else(put):
    ends = [make.make_tensor_value_info(name, FLOAT, ["batch", 5]) for name in ("obs", "action")]
    graph = make.make_graph([make.make_node("Relu", ["obs"], ["action"])], "foreign", ends[:1], ends[1:])
    path = put(make.make_model(graph).SerializeToString(), ".onnx")
    assert_refused(path, "not an export of Hurtle's")


def test_a_card_that_is_no_card(good, put):
    model = onnx.ModelProto()
    model.ParseFromString(good[".onnx"])
    next(entry for entry in model.metadata_props if entry.key == KEY).value = "[" * 100_000
    assert_refused(put(model.SerializeToString(), ".onnx"), "cannot be read")


def test_weights_in_other_files(good, put, tmp_path):
    (tmp_path / "secret").write_bytes(bytes(10_000))

    def outside(tensor):
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", "secret"), ("offset", "0"), ("length", "320")):
            tensor.external_data.add(key=key, value=value)

    def initializer(model):
        outside(model.graph.initializer[0])

    def attribute(model):
        node = onnx.helper.make_node("Constant", [], ["more"], value=onnx.numpy_helper.from_array(np.zeros(80, np.float32)))
        outside(node.attribute[0].t)
        model.graph.node.insert(0, node)

    for change in (initializer, attribute):
        assert_refused(put(onnx_with(good[".onnx"], change_model=change), ".onnx"), "it keeps weights in other files")


BAD_LAYERS = {
    "no layers": set_to("mlp", {}),
    "layers as text": set_to("mlp", "layers", "all"),
    "an empty list of layers": set_to("mlp", "layers", []),
    "a layer that is not there": set_to("mlp", "layers", 0, "weight", "nothing"),
    "a name that is a list": set_to("mlp", "layers", 0, "weight", ["weight"]),
    "a bias as the weight": lambda card: card["mlp"]["layers"][0].update(weight=card["mlp"]["layers"][0]["bias"]),
    "a weight as the bias": lambda card: card["mlp"]["layers"][0].update(bias=card["mlp"]["layers"][0]["weight"]),
    "layers in another order": lambda card: card["mlp"]["layers"].reverse(),
    "an unknown activation": set_to("mlp", "layers", 0, "activation", "sine"),
    "a mean alone": lambda card: card["mlp"].update(mean=card["mlp"]["layers"][0]["bias"]),
    "a bound as text": set_to("mlp", "clip", "ten"),
}


@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in BAD_LAYERS.items()])
def test_layers_that_are_none(good, put, change):
    assert_refused(put(onnx_with(good[".onnx"], change), ".onnx"))


# Operations.


def with_nodes(content, *nodes, **constants):
    """The file with more nodes, which nothing uses, before its own."""

    def change(model):
        kept = list(model.graph.node)
        del model.graph.node[:]
        model.graph.node.extend([*nodes, *kept])
        for name, values in constants.items():
            array = np.asarray(values)
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))

    return onnx_with(content, change_model=change)


def branch():
    ends = [make.make_tensor_value_info("taken", FLOAT, [])]
    constant = make.make_node("Constant", [], ["taken"], value_float=1.0)
    return make.make_graph([constant], "branch", [], ends)


STRANGE = {
    "If": make.make_node("If", ["yes"], ["more"], then_branch=branch(), else_branch=branch()),
    "Loop": make.make_node("Loop", ["", "yes"], ["more"], body=branch()),
    "Resize": make.make_node("Resize", ["obs"], ["more"]),
    "RandomNormal": make.make_node("RandomNormal", [], ["more"], shape=[1 << 40]),
    "StringConcat": make.make_node("StringConcat", ["a", "a"], ["more"]),
    "com.microsoft.Gelu": make.make_node("Gelu", ["obs"], ["more"], domain="com.microsoft"),
    "mine.Relu": make.make_node("Relu", ["obs"], ["more"], domain="mine"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_operations_that_are_not_known_are_named(good, put, name):
    assert_refused(put(with_nodes(good[".onnx"], STRANGE[name], yes=True), ".onnx"), f"has the operation '{name}'")


def test_a_known_operation_with_a_graph_inside(good, put):
    node = make.make_node("Relu", ["obs"], ["more"])
    node.attribute.append(make.make_attribute("body", branch()))
    assert_refused(put(with_nodes(good[".onnx"], node), ".onnx"), "has the operation 'Relu'")


def test_functions_and_training_graphs(good, put):
    def function(model):
        relu = make.make_node("Relu", ["x"], ["y"])
        model.functions.append(make.make_function("mine", "Own", ["x"], ["y"], [relu], [make.make_opsetid("", 20)]))

    def training(model):
        model.training_info.add().algorithm.CopyFrom(model.graph)

    for change in (function, training):
        assert_refused(put(onnx_with(good[".onnx"], change_model=change), ".onnx"), "functions or a training graph")


def test_sparse_tensors(good, put):
    def change(model):
        sparse = model.graph.sparse_initializer.add()
        sparse.values.CopyFrom(onnx.numpy_helper.from_array(np.ones(1, np.float32), "sparse"))

    assert_refused(put(onnx_with(good[".onnx"], change_model=change), ".onnx"), "sparse")


# Sizes.


def grown(size):
    """Nodes that make a tensor of some size in many ways, and the constants they need."""
    relu, shape = make.make_node("Relu", ["obs"], ["more"]), make.make_node("Shape", ["obs"], ["rows"], start=0, end=1)
    fill = make.make_node("ConstantOfShape", ["size"], ["more"])
    some = {"size": np.array([size], np.int64), "two": np.array([2], np.int64), "one": np.float32(1.0)}
    return {
        "a constant": ([fill], some),
        "two constants": ([fill], {"size": np.array([2, size // 2], np.int64)}),
        "a Constant": ([make.make_node("Constant", [], ["size"], value_ints=[size]), fill], {}),
        "a constant tensor": (
            [make.make_node("Constant", [], ["size"], value=onnx.numpy_helper.from_array(some["size"])), fill], {},
        ),
        "joined": (
            [shape, make.make_node("Concat", ["rows", "part"], ["size"], axis=0), fill], {"part": some["size"]},
        ),
        "a product": (
            [make.make_node("Mul", ["half", "two"], ["size"]), fill], {**some, "half": some["size"] // 2},
        ),
        "expanded": ([make.make_node("Expand", ["one", "size"], ["more"])], some),
        "tiled": ([make.make_node("Tile", ["one", "size"], ["more"])], some),
        "padded": ([make.make_node("Pad", ["one", "size"], ["more"])], some),
        "one-hot": ([make.make_node("OneHot", ["two", "size", "one"], ["more"])], some),
        "a range": (
            [make.make_node("Range", ["zero", "end", "one"], ["more"])],
            {**some, "zero": np.float32(0), "end": np.float32(size)},
        ),
        "small steps": (
            [make.make_node("Range", ["zero", "one", "step"], ["more"])],
            {**some, "zero": np.float32(0), "step": np.float32(1 / size)},
        ),
        "an attribute": ([relu, make.make_node("MaxPool", ["more"], ["pooled"], kernel_shape=[1], pads=[size, 1])], {}),
    }  # fmt: skip


@pytest.mark.parametrize("name", grown(1))
def test_sizes_that_no_memory_holds(good, put, name):
    nodes, constants = grown(4 * MAX_NUMBERS)[name]
    with pytest.raises(PolicyFileError, match="a size that is too large"):
        read_onnx(with_nodes(good[".onnx"], *nodes, **constants))
    nodes, constants = grown(1 << 10)[name]
    read_onnx(with_nodes(good[".onnx"], *nodes, **constants))


def test_sizes_that_come_from_observations(good):
    for node in (make.make_node("Cast", ["obs"], ["size"], to=INT64), make.make_node("Exp", ["some"], ["size"])):
        fill = make.make_node("ConstantOfShape", ["size"], ["more"])
        with pytest.raises(PolicyFileError, match="cannot be bounded"):
            read_onnx(with_nodes(good[".onnx"], node, fill, some=np.ones(1, np.float32)))


def test_a_size_that_is_no_number(good):
    fill = make.make_node("ConstantOfShape", ["size"], ["more"])
    with pytest.raises(PolicyFileError, match="a size that is too large"):
        read_onnx(with_nodes(good[".onnx"], fill, size=np.array([np.nan], np.float32)))


def test_small_additions_change_nothing(good, put):
    """What the tests above refuse is refused for what it is."""
    node = make.make_node("Relu", ["obs"], ["more"])
    assert use(put(with_nodes(good[".onnx"], node), ".onnx")) == use(put(good[".onnx"], ".onnx"))


def test_a_missing_package_is_named(good, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(HurtleError, match=r"need onnx: pip install .hurtle\[export\]") as caught:
        read_onnx(good[".onnx"])
    assert not isinstance(caught.value, PolicyFileError)
