import random

import numpy as np
import pytest
from grpc_server import infer_request

from hurtle.errors import ServingError
from hurtle.serving.grpc.codec import parse_request
from hurtle.serving.grpc.templates import LEARN_EVERY, MAX_TEMPLATES, Templates, make_template
from hurtle.serving.protos import ModelInferRequest


def two_inputs(request_id="", **parameters):
    message = infer_request("m", np.arange(6, dtype=np.int16).reshape(2, 3), request_id=request_id, **parameters)
    message.inputs.add(name="mask", datatype="BOOL", shape=[2])
    message.inputs.add(name="text", datatype="BYTES", shape=[1])
    message.raw_input_contents.extend([b"\1\0", b"\3\0\0\0abc"])
    message.outputs.add(name="y")
    message.model_version = "3"
    return message


SAMPLES = [
    infer_request(),
    infer_request(request_id="7"),
    two_inputs(),
    two_inputs("ü", n=3, on=True),
    infer_request("", np.zeros((0, 4))),
]


def as_plain(request):
    inputs = {name: (array.dtype, array.shape, array.tolist()) for name, array in request.inputs.items()}
    return request.model, request.version, request.id, list(inputs.items()), request.outputs, request.parameters


def outcome(payload):
    try:
        return as_plain(parse_request(payload)[0])
    except ServingError as error:
        return str(error)


@pytest.mark.parametrize("message", SAMPLES)
def test_a_template_reads_what_was_parsed_with_other_ids_and_data(message):
    payload = message.SerializeToString()
    template = make_template(payload, *parse_request(payload))
    for request_id in ("", "a", "ü" * 60):
        message.id = request_id
        payload = message.SerializeToString()
        found = template.fill(payload)
        assert found is not None
        assert as_plain(found) == outcome(payload)
        assert all(array.flags.aligned for array in found.inputs.values())


def test_a_template_never_reads_bytes_as_something_else_than_parsing_does():
    rng, filled = random.Random(6), 0
    payloads = [message.SerializeToString() for message in SAMPLES]
    templates = [make_template(payload, *parse_request(payload)) for payload in payloads]
    for _ in range(20_000):
        data = bytearray(rng.choice(payloads))
        for _ in range(rng.choice((1, 1, 2))):
            at = rng.randrange(len(data) + 1)
            kind = rng.randrange(4)
            if kind == 0 and at < len(data):
                data[at] = rng.randrange(256)
            elif kind == 1:
                data[at:at] = rng.randbytes(rng.randrange(1, 4))
            elif kind == 2:
                del data[at : at + rng.randrange(1, 4)]
            elif at < len(data):
                data[at] ^= 1 << rng.randrange(8)
        for template in templates:
            found = template.fill(bytes(data))
            if found is not None:
                filled += 1
                assert repr(as_plain(found)) == repr(outcome(bytes(data)))
    assert filled > 1000


def test_parameters_are_each_request_s_own():
    payload = two_inputs(n=1).SerializeToString()
    template = make_template(payload, *parse_request(payload))
    template.fill(payload).parameters["n"] = 2
    assert template.fill(payload).parameters == {"n": 1}


def test_there_are_templates_only_for_raw_data_in_the_usual_order():
    typed = ModelInferRequest(model_name="m")
    typed.inputs.add(name="x", datatype="INT8", shape=[1]).contents.int_contents.append(1)
    payload = typed.SerializeToString()
    assert make_template(payload, *parse_request(payload)) is None
    first, second = ModelInferRequest(model_name="a" * 5), infer_request()
    payload = second.SerializeToString() + first.SerializeToString()  # the last name counts
    assert make_template(payload, *parse_request(payload)) is None
    long = infer_request(text="x" * 5000).SerializeToString()
    assert make_template(long, *parse_request(long)) is None


def test_the_templates_used_most_stay():
    templates = Templates()
    payloads = [infer_request(f"model-{n}").SerializeToString() for n in range(30)]
    for payload in payloads:
        for _ in range(LEARN_EVERY):
            templates.learn(payload, *parse_request(payload))
        assert templates.find(payload).model == parse_request(payload)[0].model
    assert sum(templates.find(payload) is not None for payload in payloads) == MAX_TEMPLATES
