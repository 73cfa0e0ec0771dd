"""Small ONNX models, made node by node."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def value(name, kind, shape):
    return helper.make_tensor_value_info(name, kind, shape)


def write(path, nodes, inputs, outputs, initializers=(), metadata=None):
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(initializers))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    if metadata:
        helper.set_model_props(model, metadata)
    onnx.save(model, path)
    return path


def weights(name, array):
    return numpy_helper.from_array(np.asarray(array, np.float32), name)


def linear(path, first="batch", last="batch", sizes=(3, 2), weight=None):
    """y = x · w."""
    weight = np.arange(sizes[0] * sizes[1]).reshape(sizes) if weight is None else weight
    x, y = (value(name, TensorProto.FLOAT, [size, n]) for name, size, n in (("x", first, sizes[0]), ("y", last, sizes[1])))
    return write(path, [helper.make_node("MatMul", ["x", "w"], ["y"])], [x], [y], [weights("w", weight)])


def identity(path, kind, first="n"):
    tensors = [value(name, kind, [first]) for name in ("x", "y")]
    return write(path, [helper.make_node("Identity", ["x"], ["y"])], tensors[:1], tensors[1:])


def recurrent(path, metadata=None):
    """total = x + state where the mask says so; the new state is the total."""
    f, b = TensorProto.FLOAT, TensorProto.BOOL
    nodes = [
        helper.make_node("Add", ["x", "state_in_0"], ["sum"]),
        helper.make_node("Where", ["mask", "sum", "x"], ["total"]),
        helper.make_node("Identity", ["total"], ["state_out_0"]),
    ]
    inputs = [value("x", f, ["batch", 2]), value("state_in_0", f, ["batch", 2]), value("mask", b, ["batch", 2])]
    outputs = [value("total", f, ["batch", 2]), value("state_out_0", f, ["batch", 2])]
    return write(path, nodes, inputs, outputs, metadata=metadata)


def with_default(path):
    """y = x · scale, where scale is 2 unless it is given."""
    f = TensorProto.FLOAT
    inputs = [value("x", f, ["batch", 2]), value("scale", f, [1])]
    return write(
        path, [helper.make_node("Mul", ["x", "scale"], ["y"])], inputs, [value("y", f, ["batch", 2])], [weights("scale", [2.0])]
    )


def external(path, location, data=b"\0" * 24):
    """The linear model with its weights in another file."""
    model = onnx.load(linear(path))
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, text in (("location", location), ("offset", "0"), ("length", str(len(data)))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, text
    path.write_bytes(model.SerializeToString())
    return path
