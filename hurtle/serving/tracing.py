"""`Tracing`: an OpenTelemetry span for each inference, sent to a collector. Needs the extra `telemetry`; off by default.

request (and its caller's `traceparent`) → span → batch → OTLP over HTTP, in OpenTelemetry's own thread.
"""

from __future__ import annotations

from typing import Any

from hurtle import __version__
from hurtle.errors import HurtleError, ServingError
from hurtle.serving.messages import InferRequest, InferResponse, Reply


class Tracing:
    """Sends spans.

    Args:
        endpoint: URL of the collector, such as http://collector:4318/v1/traces.

    Raises:
        HurtleError: OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str):
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise HurtleError(f'Tracing needs OpenTelemetry: pip install "hurtle[telemetry]" ({error}).') from None
        self._trace: Any = trace
        self._propagator = TraceContextTextMapPropagator()
        self._provider = TracerProvider(resource=Resource.create({"service.name": "hurtle", "service.version": __version__}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("hurtle.serving", __version__)

    def traced(self, request: InferRequest, reply: Reply) -> Reply:
        """Start the request's span; returns a reply that also ends it."""
        context = self._propagator.extract({"traceparent": request.trace_parent}) if request.trace_parent else None
        attributes = {"model": request.model, "request.id": request.id}
        span = self._tracer.start_span("infer", context, self._trace.SpanKind.SERVER, attributes)

        def ended(answer: InferResponse | ServingError) -> None:
            if isinstance(answer, InferResponse):
                span.set_attribute("model.version", answer.version)
            else:
                span.set_attribute("error.type", answer.reason)
                span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, str(answer)[:200]))
            span.end()
            reply(answer)

        return ended

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()
