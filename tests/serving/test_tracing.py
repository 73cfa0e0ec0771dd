"""Spans: sent to a collector, children of their caller's, with what went wrong."""

import http.server
import threading

import pytest
from serving_helpers import request

from hurtle.errors import ServingError
from hurtle.serving.messages import InferResponse
from hurtle.serving.tracing import Tracing

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")


@pytest.fixture
def collector():
    bodies = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
    server.shutdown()
    thread.join()
    server.server_close()


def test_each_inference_is_a_span_of_its_callers_trace(collector):
    endpoint, bodies = collector
    tracing, answers = Tracing(endpoint), []
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    tracing.traced(request(trace_parent=parent, id="a"), answers.append)(InferResponse("m", "3", "a", {}))
    tracing.traced(request(), answers.append)(ServingError("not_found", "no such model"))
    tracing.close()
    spans = []
    for body in bodies:
        message = trace_service.ExportTraceServiceRequest.FromString(body)
        spans += [span for found in message.resource_spans for scope in found.scope_spans for span in scope.spans]
    good, bad = spans
    assert good.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert good.parent_span_id.hex() == "b7ad6b7169203331"
    assert {entry.key: entry.value.string_value for entry in good.attributes} == {
        "model": "m",
        "request.id": "a",
        "model.version": "3",
    }
    assert bad.status.message == "no such model"
    assert bad.trace_id != good.trace_id
    assert len(answers) == 2


def test_a_traceparent_that_is_none_is_ignored(collector):
    endpoint, bodies = collector
    tracing, answers = Tracing(endpoint), []
    tracing.traced(request(trace_parent="\r\nnonsense" * 100), answers.append)(InferResponse("m", "1", "", {}))
    tracing.close()
    assert len(bodies) == len(answers) == 1
