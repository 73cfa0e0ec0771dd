"""Good policy files, changed ones with hashes that fit again, and what a user would do with them."""

import io
import json
import re
import zipfile
from dataclasses import replace

import numpy as np
import pytest

import hurtle
from hurtle.deploy.card import Card
from hurtle.deploy.onnx_file import KEY, onnx_hash
from hurtle.deploy.pt2_file import MEMBER, pt2_hash
from hurtle.errors import HurtleError, PolicyFileError

onnx = pytest.importorskip("onnx")
OBS = np.array([0.5, -1.0, 2.0, 0.0, 1.0], np.float32)
both = pytest.mark.parametrize("suffix", [".onnx", ".pt2"])


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
    members = pt2_members(content)
    card = json.loads(members.pop(f"extra/{MEMBER}"))
    if change_members is not None:
        change_members(members)
    if change_card is not None:
        change_card(card)
    text, buffer = json.dumps(card), io.BytesIO()
    try:
        read = Card.from_json(text)
        text = replace(read, sha256=pt2_hash(members, read)).to_json()
    except PolicyFileError:
        pass
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, member in {**members, f"extra/{MEMBER}": text}.items():
            archive.writestr(f"archive/{name}", member)
    return buffer.getvalue()


def pt2_members(content):
    """By name, without the folder that all are in."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}


def set_to(*keys_and_value):
    """A change of one entry of a card."""
    *keys, last, value = keys_and_value

    def change(card):
        for key in keys:
            card = card[key]
        card[last] = value

    return change
