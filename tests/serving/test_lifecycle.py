"""The state machines of connections and of HTTP/2 streams: every state × event, against a table written down independently."""

from itertools import product

import pytest
from grpc_server import FakeService
from http2_client import HELLO, INFER, MemoryTransport, block, call, feed
from serving_helpers import run

from hurtle.serving.grpc.connection import GrpcConnection
from hurtle.serving.grpc.http2_frames import ACK, END_HEADERS, HEADERS, PING, PREFACE, frame, settings
from hurtle.serving.grpc.http2_stream import TRANSITIONS as STREAM_TRANSITIONS
from hurtle.serving.grpc.http2_stream import Stream, StreamEvent, StreamState
from hurtle.serving.lifecycle import Event, IllegalTransition, Lifecycle, State

LEGAL = """
PREFACE            PREFACE_RECEIVED   SETTINGS
PREFACE            DRAIN              PREFACE_DRAINING
PREFACE            CLOSE              CLOSED
SETTINGS           SETTINGS_RECEIVED  OPEN
SETTINGS           DRAIN              SETTINGS_DRAINING
SETTINGS           CLOSE              CLOSED
PREFACE_DRAINING   PREFACE_RECEIVED   SETTINGS_DRAINING
PREFACE_DRAINING   CLOSE              CLOSED
SETTINGS_DRAINING  SETTINGS_RECEIVED  DRAINING
SETTINGS_DRAINING  CLOSE              CLOSED
OPEN               DRAIN              DRAINING
OPEN               END                ENDING
OPEN               CLOSE              CLOSED
DRAINING           GRACE_OVER         CLOSE_IDLE
DRAINING           CUT                LAST_CALL
DRAINING           END                DRAINED
DRAINING           CLOSE              CLOSED
CLOSE_IDLE         CUT                LAST_CALL
CLOSE_IDLE         END                DRAINED
CLOSE_IDLE         CLOSE              CLOSED
LAST_CALL          END                DRAINED
LAST_CALL          CLOSE              CLOSED
ENDING             DRAIN              DRAINED
ENDING             END                ENDING
ENDING             CLOSE              CLOSED
DRAINED            END                DRAINED
DRAINED            CLOSE              CLOSED
"""
STREAM_LEGAL = """
OPEN                REMOTE_END  HALF_CLOSED_REMOTE
OPEN                LOCAL_END   HALF_CLOSED_LOCAL
OPEN                CLOSE       CLOSED
HALF_CLOSED_REMOTE  LOCAL_END   FLUSHING
HALF_CLOSED_REMOTE  CLOSE       CLOSED
HALF_CLOSED_LOCAL   REMOTE_END  FLUSHING
HALF_CLOSED_LOCAL   CLOSE       CLOSED
FLUSHING            CLOSE       CLOSED
"""


def table(text, states, events):
    rows = [line.split() for line in text.split("\n") if line]
    return {(states[state], events[event]): states[after] for state, event, after in rows}


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)), ids=lambda value: value.name)
def test_every_event_in_every_state_of_a_connection(state, event):
    lifecycle, after = Lifecycle(state), table(LEGAL, State, Event).get((state, event))
    assert lifecycle.allows(event) == (after is not None)
    if after is None:
        with pytest.raises(IllegalTransition, match=f"{event.name} in state {state.name}"):
            lifecycle.fire(event)
        assert lifecycle.state is state
    else:
        assert lifecycle.fire(event) is lifecycle.state is after


@pytest.mark.parametrize(("state", "event"), list(product(StreamState, StreamEvent)), ids=lambda value: value.name)
def test_every_event_in_every_state_of_a_stream(state, event):
    stream, after = Stream.__new__(Stream), table(STREAM_LEGAL, StreamState, StreamEvent).get((state, event))
    stream.state = state
    if after is None:
        with pytest.raises(KeyError):
            stream.fire(event)
        assert stream.state is state
    else:
        stream.fire(event)
        assert stream.state is after


def test_every_state_can_be_reached_and_left_and_only_closed_is_final():
    reached = {after for events in STREAM_TRANSITIONS.values() for after in events.values()} | {StreamState.OPEN}
    assert reached == set(StreamState)
    assert [state for state, events in STREAM_TRANSITIONS.items() if not events] == [StreamState.CLOSED]
    legal = table(LEGAL, State, Event)
    assert set(legal.values()) | {State.PREFACE} == set(State)
    assert {state for state, _ in legal} == set(State) - {State.CLOSED}


class DrainedTransport(MemoryTransport):
    def can_write_eof(self):
        return False


DRAIN_ACK = frame(PING, ACK, 0, b"draining")
STEPS = {
    "nothing yet": ([], State.PREFACE),
    "half a preface": ([PREFACE[:9]], State.PREFACE),
    "a preface": ([PREFACE], State.SETTINGS),
    "a handshake": ([HELLO], State.OPEN),
    "a call": ([HELLO, call(1, INFER)], State.OPEN),
    "no SETTINGS first": ([PREFACE, call(1, INFER)], State.CLOSED),
    "no preface": ([b"nonsense"], State.CLOSED),
    "HTTP/1": ([b"GET / HTTP/1.1\r\n"], State.CLOSED),
    "drain": (["drain"], State.PREFACE_DRAINING),
    "preface, drain": ([PREFACE, "drain"], State.SETTINGS_DRAINING),
    "drain, preface": (["drain", PREFACE], State.SETTINGS_DRAINING),
    "drain, handshake": (["drain", HELLO], State.DRAINING),
    "handshake, drain": ([HELLO, "drain", "drain"], State.DRAINING),
    "an answer to a PING nobody sent": ([HELLO, DRAIN_ACK], State.OPEN),
    "last call with a stream open": ([HELLO, frame(HEADERS, END_HEADERS, 1, block()), "drain", DRAIN_ACK], State.LAST_CALL),
    "last call while idle": ([HELLO, "drain", DRAIN_ACK], State.CLOSED),
    "later SETTINGS": ([HELLO, settings([(4, 100)]), "drain", settings([])], State.DRAINING),
    "abort": ([HELLO, "abort", "drain", HELLO], State.CLOSED),
}


@pytest.mark.parametrize("name", STEPS)
def test_an_http2_connection_is_in_the_state_that_its_bytes_say(name):
    steps, expected = STEPS[name]

    async def main():
        connection, transport = GrpcConnection(FakeService()), DrainedTransport()
        connection.connection_made(transport)
        for step in steps:
            if isinstance(step, bytes):
                connection.data_received(step)
            else:
                getattr(connection, step)()
        found = connection.lifecycle.state
        connection.connection_lost(None)
        assert connection.lifecycle.state is State.CLOSED
        assert not connection.service.connections
        return found

    assert run(main()) is expected


def test_streams_enter_and_leave_their_states():
    async def main():
        connection, _ = feed(FakeService(), [HELLO, call(1, INFER)[:-4]])
        stream = connection.streams[1]
        found = [stream.state]
        connection.data_received(call(1, INFER)[-4:])
        found.append(stream.state)
        connection.connection_lost(None)
        return found

    assert run(main()) == [StreamState.OPEN, StreamState.CLOSED]
