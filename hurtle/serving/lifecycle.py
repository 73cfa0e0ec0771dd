"""`Lifecycle`: the state of a client's connection, of either transport, as one machine with a table of transitions.

HTTP/2:  PREFACE ──▶ SETTINGS ──▶ OPEN ──▶ DRAINING ─────────────────▶ LAST_CALL ──▶ CLOSED
HTTP/1:                           OPEN ──▶ DRAINING ──▶ CLOSE_IDLE ──▶ LAST_CALL ──▶ DRAINED ──▶ CLOSED
                                  └─────▶ ENDING (a last answer, and the server goes on) ──────▶ CLOSED
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum


class State(IntEnum):
    """What a connection does next. The order matters: from `ENDING` on, nothing more is read."""

    PREFACE = 0
    """HTTP/2: the client's preface must come first."""
    SETTINGS = 1
    """HTTP/2: the preface came; SETTINGS must follow."""
    PREFACE_DRAINING = 2
    """The server stops before the preface came; a first request may be on its way behind it."""
    SETTINGS_DRAINING = 3
    """The server stops before SETTINGS came."""
    OPEN = 4
    """Requests are taken."""
    DRAINING = 5
    """The client has been asked to go; requests that it sent before it knew are taken."""
    CLOSE_IDLE = 6
    """HTTP/1: as DRAINING, but the connection closes as soon as every request has its answer."""
    LAST_CALL = 7
    """No new request is taken; those that were taken are answered."""
    ENDING = 8
    """Nothing more is read; the connection closes after its last answer."""
    DRAINED = 9
    """As ENDING, while the server stops: the client gets a moment to read the answer."""
    CLOSED = 10
    """Nothing is read or written any more."""


class Event(IntEnum):
    """What changes a connection's state."""

    PREFACE_RECEIVED = 0
    SETTINGS_RECEIVED = 1
    """The first ones."""
    DRAIN = 2
    """The server stops, or has too many connections."""
    GRACE_OVER = 3
    """Requests that were on their way when draining began have had time to arrive."""
    CUT = 4
    """No further request may begin."""
    END = 5
    """The next answer, or the last one written, closes the connection."""
    CLOSE = 6
    """Either side has closed the connection."""


_ANY = {Event.CLOSE: State.CLOSED}
TRANSITIONS: Mapping[State, Mapping[Event, State]] = {
    State.PREFACE: {Event.PREFACE_RECEIVED: State.SETTINGS, Event.DRAIN: State.PREFACE_DRAINING, **_ANY},
    State.SETTINGS: {Event.SETTINGS_RECEIVED: State.OPEN, Event.DRAIN: State.SETTINGS_DRAINING, **_ANY},
    State.PREFACE_DRAINING: {Event.PREFACE_RECEIVED: State.SETTINGS_DRAINING, **_ANY},
    State.SETTINGS_DRAINING: {Event.SETTINGS_RECEIVED: State.DRAINING, **_ANY},
    State.OPEN: {Event.DRAIN: State.DRAINING, Event.END: State.ENDING, **_ANY},
    State.DRAINING: {Event.GRACE_OVER: State.CLOSE_IDLE, Event.CUT: State.LAST_CALL, Event.END: State.DRAINED, **_ANY},
    State.CLOSE_IDLE: {Event.CUT: State.LAST_CALL, Event.END: State.DRAINED, **_ANY},
    State.LAST_CALL: {Event.END: State.DRAINED, **_ANY},
    State.ENDING: {Event.DRAIN: State.DRAINED, Event.END: State.ENDING, **_ANY},
    State.DRAINED: {Event.END: State.DRAINED, **_ANY},
    State.CLOSED: {},
}
"""By state and event, the next state; every other pair is illegal."""


class IllegalTransition(RuntimeError):
    """An event that the state does not allow: a bug of the server, never the client's doing."""


class Lifecycle:
    """One connection's state.

    Example:
        >>> lifecycle = Lifecycle(State.OPEN)
        >>> lifecycle.fire(Event.DRAIN).name, lifecycle.allows(Event.DRAIN)
        ('DRAINING', False)
    """

    __slots__ = ("state",)

    def __init__(self, state: State):
        self.state = state

    def allows(self, event: Event) -> bool:
        """Whether an event is legal now."""
        return event in TRANSITIONS[self.state]

    def fire(self, event: Event) -> State:
        """Enter the state that follows.

        Raises:
            IllegalTransition: The event is not allowed in this state.
        """
        try:
            self.state = TRANSITIONS[self.state][event]
        except KeyError:
            raise IllegalTransition(f"{event.name} in state {self.state.name}") from None
        return self.state
