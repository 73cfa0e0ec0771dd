"""Archives that torch would run code of, or fill memory with, are refused before torch sees them."""

import contextlib
import io
import json
import pickle
import zipfile

import pytest
import torch
from file_helpers import assert_refused, pt2_members, pt2_with, use

from hurtle.deploy import pt2_file
from hurtle.deploy.card import MAX_NUMBERS
from hurtle.deploy.policy_file import read_policy_file
from hurtle.deploy.pt2_file import read_pt2
from hurtle.errors import PolicyFileError


def test_a_pt2_file_of_somebody_else(tmp_path):
    path = tmp_path / "foreign.pt2"
    torch.export.save(torch.export.export(torch.nn.Linear(5, 2), (torch.zeros(1, 5),)), path)
    assert_refused(path, "not an export of Hurtle's")


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
    members["data/sample_inputs/model.pt"] = saved(((Bomb(marker),), {}))


def pickled_weight(members, marker):
    config = json.loads(members["data/weights/model_weights_config.json"])
    payload = next(iter(config["config"].values()))
    payload["use_pickle"] = True
    members[f"data/weights/{payload['path_name']}"] = saved(Bomb(marker))
    members["data/weights/model_weights_config.json"] = json.dumps(config).encode()


def constant_named(path_name):
    """One that torch unpickles for its name, though the config denies it."""

    def change(members, marker):
        name = "data/constants/model_constants_config.json"
        config = json.loads(members[name])
        payload = next(iter(json.loads(members["data/weights/model_weights_config.json"])["config"].values()))
        config["config"]["more"] = {**payload, "path_name": path_name}
        members[name] = json.dumps(config).encode()
        bomb = pickle.dumps(Bomb(marker))
        members[f"data/constants/{path_name}"] = bomb + bytes(-len(bomb) % 4)  # a whole number of floats

    return change


def old_file(name):
    """Files of older formats, which torch still unpickles."""

    def change(members, marker):
        members[name] = saved(Bomb(marker))

    return change


def graph_with(change_graph):
    def change(members, marker):
        graph = json.loads(members["models/model.json"])
        change_graph(graph, f"open({str(marker)!r}, 'w')")
        members["models/model.json"] = json.dumps(graph).encode()

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


def code_as_guard_beside_inputs(members, marker):
    """torch looks at guards only where there are example inputs."""
    graph_with(code_as_guard)(members, marker)
    members["data/sample_inputs/model.pt"] = saved(((torch.zeros(3, 5),), {}))


MALICIOUS = {
    "pickled example inputs": pickled_inputs,
    "a pickled weight": pickled_weight,
    "an opaque constant": constant_named("opaque_obj_0"),
    "a custom constant": constant_named("custom_obj_0"),
    "weights of an older format": old_file("data/weights/model.pt"),
    "constants of an older format": old_file("data/constants/model.pt"),
    "a state of an older format": old_file("serialized_state_dict.pt"),
    "compiled code": old_file("data/aotinductor/model/model.so"),
    "code as an expression": graph_with(code_as_expression),
    "code in a list": graph_with(code_in_a_list),
    "a power without end": graph_with(a_power_without_end),
    "code as a guard": graph_with(code_as_guard),
    "code as a guard beside inputs": code_as_guard_beside_inputs,
    "a call of the system": graph_with(a_call_of_the_system),
    "a file as a tensor": graph_with(a_file_as_a_tensor),
    "an imported container": graph_with(an_imported_container),
}


@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in MALICIOUS.items()])
def test_archives_that_would_run_code(good, put, tmp_path, change):
    marker = tmp_path / "marker"
    path = put(pt2_with(good[".pt2"], lambda members: change(members, marker)), ".pt2")
    assert_refused(path, "is not a policy that Hurtle can load")
    assert not marker.exists()


RUN_BY_TORCH = (
    "pickled example inputs", "a pickled weight", "an opaque constant", "weights of an older format",
    "constants of an older format", "code as an expression", "code as a guard beside inputs",
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


def test_a_container_that_names_a_module(good, put, tmp_path, monkeypatch):
    marker = tmp_path / "marker"
    (tmp_path / "named_by_a_file.py").write_text(f"open({str(marker)!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    context = json.dumps({"__enum__": True, "fqn": "named_by_a_file:E", "name": "x"})

    def change(members):
        graph = json.loads(members["models/model.json"])
        signature = graph["graph_module"]["module_call_graph"][0]["signature"]
        version, spec = json.loads(signature["in_spec"])
        signature["in_spec"] = json.dumps([version, {**spec, "context": context}])
        members["models/model.json"] = json.dumps(graph).encode()

    path = put(pt2_with(good[".pt2"], change), ".pt2")
    assert_refused(path, "takes or returns")
    assert not marker.exists()
    with contextlib.suppress(Exception):  # torch does import it
        torch.export.load(path)
    assert marker.exists()


def test_an_archive_that_claims_to_be_larger_than_it_is(good, put):
    """Many members that lie in the same bytes."""
    content = good[".pt2"]
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries, start = archive.infolist(), archive.start_dir
        largest = max(entries, key=lambda entry: entry.file_size)
    buffer = io.BytesIO(content)
    with zipfile.ZipFile(buffer, "a") as archive:
        for n in range(900, 1200):
            copy = zipfile.ZipInfo(f"archive/data/weights/weight_{n}")
            copy.header_offset, copy.file_size, copy.compress_size = largest.header_offset, largest.file_size, largest.file_size
            copy.CRC = largest.CRC
            archive.filelist.append(copy)
        archive._didModify = True
        archive.start_dir = start
    assert_refused(put(buffer.getvalue(), ".pt2"), "claims to hold more than it does")


def test_a_long_comparison_of_sizes(good, put):
    change = graph_with(lambda graph, code: graph["guards_code"].append(" or ".join(["1 == 1"] * 1000)))
    path = put(pt2_with(good[".pt2"], lambda members: change(members, "")), ".pt2")
    assert_refused(path, "holds the code")


def test_an_export_holds_no_example_inputs(good):
    assert pt2_members(good[".pt2"])["data/sample_inputs/model.pt"] == b""


def test_memory_that_runs_out_is_not_called_a_damaged_file(good, monkeypatch):
    def fail(archive):
        raise MemoryError

    monkeypatch.setattr(pt2_file, "members_of", fail)
    with pytest.raises(MemoryError):
        read_pt2(good[".pt2"])


# Operations and sizes.


def with_node(content, target, *arguments):
    """The file with another first node: a call of `target`."""

    def change(members):
        graph = json.loads(members["models/model.json"])
        node = graph["graph_module"]["graph"]["nodes"][0]
        node["target"] = target
        node["inputs"] = [{"name": f"a{n}", "arg": argument, "kind": 1} for n, argument in enumerate(arguments)]
        members["models/model.json"] = json.dumps(graph).encode()

    return pt2_with(content, change)


@pytest.mark.parametrize(
    "name",
    [
        "aten.set_.source_Storage", "aten.resize_.default", "aten._index_put_impl_.default", "aten._unsafe_view.default",
        "aten.as_strided.default", "aten.empty.memory_format", "aten.from_file.default", "aten.add.out", "aten.max.dim_max",
        "aten.foreign", "prims.add.default", "mine.add.default",
    ],
)  # fmt: skip
def test_operations_that_are_not_known_are_named(good, put, name):
    path = put(with_node(good[".pt2"], f"torch.ops.{name}"), ".pt2")
    assert_refused(path, f"has the operation 'torch.ops.{name}'")


GROWN = {
    "a list": ("zeros.default", lambda size: {"as_ints": [2, size // 2]}),
    "a list with the batch": ("zeros.default", lambda size: {"as_sym_ints": [{"as_name": "batch"}, {"as_int": size}]}),
    "expanded": ("expand.default", lambda size: {"as_ints": [-1, size]}),
    "repeated": ("repeat.default", lambda size: {"as_ints": [size]}),
    "a range": ("arange.default", lambda size: {"as_int": size}),
    "a symbolic range": ("arange.default", lambda size: {"as_sym_int": {"as_int": size}}),
    "small steps": ("arange.start_step", lambda size: {"as_float": 1 / size}),
    "one-hot": ("one_hot.default", lambda size: {"as_int": size}),
    "dimensions without end": ("zeros.default", lambda size: {"as_ints": [size] * (size > 1 << 20 and 100_000)}),
}


@pytest.mark.parametrize("name", GROWN)
def test_sizes_that_no_memory_holds(good, name):
    target, argument = GROWN[name]
    with pytest.raises(PolicyFileError, match="has the sizes"):
        read_pt2(with_node(good[".pt2"], f"torch.ops.aten.{target}", argument(4 * MAX_NUMBERS)))
    read_pt2(with_node(good[".pt2"], f"torch.ops.aten.{target}", argument(1 << 10)))


def test_large_numbers_that_are_no_sizes(good):
    read_pt2(with_node(good[".pt2"], "torch.ops.aten.masked_fill.Scalar", {"as_int": -(10**9)}))


def test_torch_gets_nothing_but_what_was_checked(good, put):
    """A prefix moves what Python's zipfile finds, but not what torch would."""
    path = put(b"PK\x05\x06" + bytes(60) + good[".pt2"], ".pt2")
    content = read_policy_file(path).content
    assert content.startswith(b"PK\x03\x04")
    assert use(path) == use(put(good[".pt2"], ".pt2"))
