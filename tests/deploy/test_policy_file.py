"""Files that are damaged, foreign or malicious are refused by name, and nothing of what they hold is run."""

import contextlib
import io
import json
import os
import pickle
import re
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from export_helpers import hand_made

import hurtle
from hurtle.deploy import policy_file
from hurtle.deploy.policy_file import KEY, MEMBER, Card, onnx_hash, pt2_hash, read_policy_file
from hurtle.errors import HurtleError, PolicyFileError

onnx = pytest.importorskip("onnx")
OBS = np.array([0.5, -1.0, 2.0, 0.0, 1.0], np.float32)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """The bytes of good files, by their ending."""
    folder = tmp_path_factory.mktemp("good")
    run = hand_made(folder)
    for suffix in (".onnx", ".pt2"):
        hurtle.export(run, folder / f"policy{suffix}", outputs=("action", "logits"))
    return {suffix: (folder / f"policy{suffix}").read_bytes() for suffix in (".onnx", ".pt2")}


@pytest.fixture
def put(tmp_path):
    """A function that writes bytes to a file of some name."""

    def write(content, suffix):
        path = tmp_path / f"policy{suffix}"
        path.write_bytes(content)
        return path

    return write


def use(path):
    """All that a user would do, on every runtime that the file names."""
    found = []
    for runtime in ("native", "onnxruntime") if path.suffix == ".onnx" else ("torch",):
        policy = hurtle.load(path, runtime=runtime)
        found.append((policy.act(OBS), policy.card.steps))
        if runtime != "native":
            found.append(policy.outputs(OBS)["logits"].tolist())
    return found


def assert_refused(path, message=""):
    with pytest.raises(HurtleError, match=rf"(?s){re.escape(str(path))}.*{message}") as caught:
        use(path)
    assert isinstance(caught.value, PolicyFileError)


both = pytest.mark.parametrize("suffix", [".onnx", ".pt2"])


@both
def test_the_good_file_is_good(good, put, suffix):
    assert use(put(good[suffix], suffix))


@both
@pytest.mark.parametrize(
    "content", [b"", b"\0", b"Hello, policy.\n" * 100, bytes(5000), b"PK\x03\x04" + bytes(100), b"\x08" * 3000]
)
def test_what_is_no_policy_at_all(put, suffix, content):
    assert_refused(put(content, suffix))


@both
def test_random_bytes(put, suffix):
    rng = np.random.default_rng(0)
    for size in (1, 10, 100, 1000, 10_000):
        assert_refused(put(rng.bytes(size), suffix))


@both
def test_files_that_were_cut_off(good, put, suffix):
    content = good[suffix]
    for length in [*(len(content) * k // 20 for k in range(20)), len(content) - 1]:
        assert_refused(put(content[:length], suffix))


@both
def test_files_with_the_ending_of_another_format(good, put, suffix):
    assert_refused(put(good[".pt2" if suffix == ".onnx" else ".onnx"], suffix))


def flipped(content, place, bit):
    return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


def test_any_flipped_bit_of_an_onnx_file_is_found(good, put):
    content, rng = good[".onnx"], np.random.default_rng(0)
    for place in rng.integers(0, len(content), 400):
        assert_refused(put(flipped(content, int(place), int(rng.integers(8))), ".onnx"))


def test_any_flipped_bit_of_a_card_is_found(good, put):
    for suffix, content in good.items():
        start = content.index(b'{"env"')
        for place in range(start, content.index(b'"format": 1}', start) + 12, 3):
            assert_refused(put(flipped(content, place, place % 8), suffix))


def test_any_flipped_bit_of_a_pt2_file_is_found_or_means_nothing(good, put):
    """An archive has dates and attributes, which nobody reads."""
    content, rng = good[".pt2"], np.random.default_rng(0)
    expected, refused = use(put(content, ".pt2")), 0
    for place in rng.integers(0, len(content), 80):
        path = put(flipped(content, int(place), int(rng.integers(8))), ".pt2")
        try:
            found = use(path)
        except PolicyFileError:
            refused += 1
        else:
            assert found == expected
    assert refused > 30
    weights = content.index(b"weight_0") + 100
    assert_refused(put(flipped(content, weights, 3), ".pt2"))


@both
def test_what_is_no_file(tmp_path, suffix):
    assert_refused(tmp_path / f"none{suffix}", "No such file")
    (tmp_path / f"folder{suffix}").mkdir()
    assert_refused(tmp_path / f"folder{suffix}", "it is no file")
    (tmp_path / f"loop{suffix}").symlink_to(tmp_path / f"loop{suffix}")
    assert_refused(tmp_path / f"loop{suffix}")


@both
@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(good, put, suffix):
    path = put(good[suffix], suffix)
    path.chmod(0)
    assert_refused(path, "Permission denied")


@both
def test_a_read_that_fails(good, put, suffix, monkeypatch):
    path = put(good[suffix], suffix)

    def fail(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "read_bytes", fail)
    assert_refused(path, "Permission denied")


@both
def test_files_that_are_too_large(good, put, suffix, monkeypatch):
    path = put(good[suffix], suffix)
    monkeypatch.setattr(policy_file, "MAX_BYTES", len(good[suffix]) - 1)
    assert_refused(path, f"it has {len(good[suffix]):,} bytes")


def test_an_archive_that_is_too_large_when_unpacked(good, put, monkeypatch):
    buffer = io.BytesIO(good[".pt2"])
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/weights/weight_99", bytes(1 << 22))
    path = put(buffer.getvalue(), ".pt2")
    monkeypatch.setattr(policy_file, "MAX_BYTES", 1 << 20)
    assert_refused(path, "too large when unpacked")


@both
def test_a_card_that_is_too_long(good, put, suffix, monkeypatch):
    path = put(good[suffix], suffix)
    monkeypatch.setattr(policy_file, "MAX_CARD", 100)
    assert_refused(path)


# Files of others.


def test_an_onnx_model_of_somebody_else(put):
    make, float32 = onnx.helper, onnx.TensorProto.FLOAT
    ends = [make.make_tensor_value_info(name, float32, ["batch", 5]) for name in ("obs", "action")]
    graph = make.make_graph([make.make_node("Relu", ["obs"], ["action"])], "foreign", ends[:1], ends[1:])
    path = put(make.make_model(graph).SerializeToString(), ".onnx")
    assert_refused(path, "not an export of Hurtle's")


def test_a_pt2_file_of_somebody_else(tmp_path):
    path = tmp_path / "foreign.pt2"
    torch.export.save(torch.export.export(torch.nn.Linear(5, 2), (torch.zeros(1, 5),)), path)
    assert_refused(path, "not an export of Hurtle's")


# Cards, changed, with a hash that fits again.


def onnx_with(content, change_card=None, change_model=None):
    model = onnx.ModelProto()
    model.ParseFromString(content)
    entry = next(entry for entry in model.metadata_props if entry.key == KEY)
    if change_model is not None:
        change_model(model)
    card = json.loads(entry.value)
    if change_card is not None:
        change_card(card)
    entry.value = json.dumps(card)
    try:
        read = Card.from_json(entry.value)
        entry.value = replace(read, sha256=onnx_hash(model, read)).to_json()
    except PolicyFileError:
        pass
    return model.SerializeToString(deterministic=True)


def pt2_with(content, change_members=None, change_card=None):
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    card = json.loads(members.pop(f"archive/extra/{MEMBER}"))
    if change_members is not None:
        change_members(members)
    if change_card is not None:
        change_card(card)
    text, buffer = json.dumps(card), io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, member in members.items():
            archive.writestr(name, member)
        try:
            read = Card.from_json(text)
            text = replace(read, sha256=pt2_hash(archive, read)).to_json()
        except PolicyFileError:
            pass
        archive.writestr(f"archive/extra/{MEMBER}", text)
    return buffer.getvalue()


def test_a_new_hash_makes_a_changed_card_good(good, put):
    """What the tests below refuse is refused for what it says, not for its hash."""
    assert use(put(onnx_with(good[".onnx"], lambda card: card.update(steps=7)), ".onnx"))[0][1] == 7
    assert use(put(pt2_with(good[".pt2"], change_card=lambda card: card.update(steps=7)), ".pt2"))[0][1] == 7


def set_to(*keys_and_value):
    """A change of one entry of a card."""
    *keys, last, value = keys_and_value

    def change(card):
        for key in keys:
            card = card[key]
        card[last] = value

    return change


BAD_CARDS = {
    "another format": set_to("format", 2),
    "no format": lambda card: card.pop("format"),
    "an unknown entry": set_to("colour", "red"),
    "no env": lambda card: card.pop("env"),
    "no inputs": lambda card: card.pop("inputs"),
    "an env that is a number": set_to("env", 3),
    "an env that is a list": set_to("env", ["cartpole"]),
    "steps as text": set_to("steps", "100"),
    "steps as a bool": set_to("steps", True),
    "a flag as text": set_to("deterministic", "yes"),
    "parameters as a list": set_to("env_parameters", []),
    "a return as text": set_to("mean_return", "high"),
    "an unknown distribution": set_to("distribution", "cauchy"),
    "another distribution": set_to("distribution", "beta"),
    "inputs as text": set_to("inputs", "obs"),
    "inputs as null": set_to("inputs", None),
    "no observation": set_to("inputs", []),
    "a tensor without a name": set_to("inputs", 0, "name", None),
    "another name": set_to("inputs", 0, "name", "observation"),
    "another output": set_to("outputs", 1, "name", "value"),
    "an unknown dtype": set_to("inputs", 0, "dtype", "float33"),
    "another dtype": set_to("outputs", 1, "dtype", "float64"),
    "a negative shape": set_to("inputs", 0, "shape", [-5]),
    "a shape as text": set_to("inputs", 0, "shape", "five"),
    "another shape": set_to("inputs", 0, "shape", [6]),
    "another shape of the output": set_to("outputs", 1, "shape", [9]),
    "a mask that no input is": set_to("masked", True),
    "a memory that never comes out": lambda card: card["inputs"].append(
        {"name": "state_in_0", "dtype": "float32", "shape": [8]}
    ),
    "an unknown space": set_to("observation_space", "type", "Sphere"),
    "a space as text": set_to("observation_space", "Box"),
    "a space of negative shape": set_to("observation_space", "shape", [-1]),
    "a space of another shape": set_to("observation_space", "shape", [4]),
    "a space larger than memory": set_to("observation_space", "shape", [1 << 50]),
    "no actions": set_to("action_space", "n", 0),
    "fewer actions": set_to("action_space", "n", 3),
    "actions as text": set_to("action_space", "n", "four"),
    "a structure without entries": set_to("structure", {}),
    "a structure as text": set_to("structure", "Dict"),
}
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


@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in (BAD_CARDS | BAD_LAYERS).items()])
def test_cards_that_are_wrong(good, put, change):
    assert_refused(put(onnx_with(good[".onnx"], change), ".onnx"))


@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in list(BAD_CARDS.items())[:12]])
def test_cards_of_pt2_files_that_are_wrong(good, put, change):
    assert_refused(put(pt2_with(good[".pt2"], change_card=change), ".pt2"))


@pytest.mark.parametrize("text", ["", "null", "[]", "3", "{", '{"format": 1}', "[" * 100_000, '{"format": NaN}'])
def test_cards_that_are_no_cards(good, put, text):
    model = onnx.ModelProto()
    model.ParseFromString(good[".onnx"])
    next(entry for entry in model.metadata_props if entry.key == KEY).value = text
    assert_refused(put(model.SerializeToString(), ".onnx"))


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


# Archives that torch would run code of.


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (open, (str(self.marker), "w"))


def saved(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def pickled_inputs(members, marker):
    members["archive/data/sample_inputs/model.pt"] = saved(((Bomb(marker),), {}))


def pickled_weight(members, marker):
    config = json.loads(members["archive/data/weights/model_weights_config.json"])
    payload = next(iter(config["config"].values()))
    payload["use_pickle"] = True
    members[f"archive/data/weights/{payload['path_name']}"] = saved(Bomb(marker))
    members["archive/data/weights/model_weights_config.json"] = json.dumps(config).encode()


def constant_named(path_name):
    """One that torch unpickles for its name, though the config denies it."""

    def change(members, marker):
        name = "archive/data/constants/model_constants_config.json"
        config = json.loads(members[name])
        payload = next(iter(json.loads(members["archive/data/weights/model_weights_config.json"])["config"].values()))
        config["config"]["more"] = {**payload, "path_name": path_name}
        members[name] = json.dumps(config).encode()
        bomb = pickle.dumps(Bomb(marker))
        members[f"archive/data/constants/{path_name}"] = bomb + bytes(-len(bomb) % 4)  # a whole number of floats

    return change


def old_file(name):
    """Files of older formats, which torch still unpickles."""

    def change(members, marker):
        members[name] = saved(Bomb(marker))

    return change


def graph_with(change_graph):
    def change(members, marker):
        graph = json.loads(members["archive/models/model.json"])
        change_graph(graph, f"open({str(marker)!r}, 'w')")
        members["archive/models/model.json"] = json.dumps(graph).encode()

    return change


def expressions(tree):
    """The dicts that hold an expression."""
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    if isinstance(tree, dict) and "expr_str" in tree:
        yield tree
    for child in children:
        yield from expressions(child)


def code_as_expression(graph, code):
    for holder in expressions(graph):
        holder["expr_str"] = code


def code_in_a_list(graph, code):
    for holder in expressions(graph):
        holder["expr_str"] = [code]


def a_power_without_end(graph, code):
    for holder in expressions(graph):
        holder["expr_str"] = "9**9**9**9"


def code_as_guard(graph, code):
    graph["guards_code"] = [*graph["guards_code"], f"{code} is not None"]


def a_call_of_the_system(graph, code):
    node = next(node for node in graph["graph_module"]["graph"]["nodes"])
    node["target"] = "torch.os.system"
    node["inputs"] = [{"name": "command", "arg": {"as_string": f"touch {code[6:-7]}"}, "kind": 1}]


def a_file_as_a_tensor(graph, code):
    graph["graph_module"]["graph"]["nodes"][0]["target"] = "torch.ops.aten.from_file.default"


def an_imported_container(graph, code):
    spec = {"type": "collections.defaultdict", "context": '{"default_factory_module": "antigravity"}', "children_spec": []}
    graph["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = json.dumps([1, spec])


MALICIOUS = {
    "pickled example inputs": pickled_inputs,
    "a pickled weight": pickled_weight,
    "an opaque constant": constant_named("opaque_obj_0"),
    "a custom constant": constant_named("custom_obj_0"),
    "weights of an older format": old_file("archive/data/weights/model.pt"),
    "constants of an older format": old_file("archive/data/constants/model.pt"),
    "a state of an older format": old_file("serialized_state_dict.pt"),
    "compiled code": old_file("archive/data/aotinductor/model/model.so"),
    "code as an expression": graph_with(code_as_expression),
    "code in a list": graph_with(code_in_a_list),
    "a power without end": graph_with(a_power_without_end),
    "code as a guard": graph_with(code_as_guard),
    "a call of the system": graph_with(a_call_of_the_system),
    "a file as a tensor": graph_with(a_file_as_a_tensor),
    "an imported container": graph_with(an_imported_container),
}


@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in MALICIOUS.items()])
def test_archives_that_would_run_code(good, put, tmp_path, change):
    marker = tmp_path / "marker"
    path = put(pt2_with(good[".pt2"], lambda members: change(members, marker)), ".pt2")
    assert_refused(path, "is no policy that Hurtle can load")
    assert not marker.exists()


RUN_BY_TORCH = (
    "pickled example inputs", "a pickled weight", "an opaque constant", "weights of an older format",
    "constants of an older format", "code as an expression", "code as a guard",
)  # fmt: skip


@pytest.mark.parametrize("name", RUN_BY_TORCH)
def test_these_archives_do_run_code_in_torch(good, put, tmp_path, name):
    """Else the test above would prove nothing."""
    marker = tmp_path / "marker"
    path = put(pt2_with(good[".pt2"], lambda members: MALICIOUS[name](members, marker)), ".pt2")
    with contextlib.suppress(Exception):  # after the fact
        torch.export.load(path).module()(torch.zeros(1, 5))
    assert marker.exists()


def test_a_member_that_is_there_twice(good, put, tmp_path):
    marker, buffer = tmp_path / "marker", io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(good[".pt2"])) as archive, zipfile.ZipFile(buffer, "w") as twice:
        twice.writestr("other/data/sample_inputs/model.pt", saved(((Bomb(marker),), {})))
        for name in archive.namelist():
            twice.writestr(name, archive.read(name))
    assert_refused(put(buffer.getvalue(), ".pt2"), "a member twice")
    assert not marker.exists()


def test_a_compressed_archive_is_refused(good, put):
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(good[".pt2"])) as archive, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in archive.namelist():
            packed.writestr(name, archive.read(name))
    assert_refused(put(buffer.getvalue(), ".pt2"), "compressed")


def test_a_container_that_names_a_module_is_refused(good, put):
    def change(members):
        name = next(name for name in members if name.endswith("models/model.json"))
        text = members[name].decode()
        evil = json.dumps(json.dumps({"__enum__": True, "fqn": "antigravity:E", "name": "x"}))[1:-1]
        escaped = json.dumps(evil)[1:-1]
        assert '\\"context\\": \\"null\\"' in text
        members[name] = text.replace('\\"context\\": \\"null\\"', f'\\"context\\": \\"{escaped}\\"', 1).encode()

    assert_refused(put(pt2_with(good[".pt2"], change), ".pt2"), "takes or gives")


def test_torch_gets_nothing_but_what_was_checked(good, put):
    """A prefix moves what Python's zipfile finds, but not what torch would."""
    path = put(b"PK\x05\x06" + bytes(60) + good[".pt2"], ".pt2")
    content = read_policy_file(path).content
    assert content.startswith(b"PK\x03\x04")
    assert use(path) == use(put(good[".pt2"], ".pt2"))
