"""The load generator's arithmetic and its two loops, against servers that misbehave in known ways."""

import asyncio
import json
import time

import numpy as np
import pytest
from repeating import repeated
from serving_helpers import run

from hurtle.errors import HurtleError
from hurtle.serving.load.generator import Generator, Result, Setting, merged
from hurtle.serving.load.http_client import HttpClient
from hurtle.serving.load.processes import split
from hurtle.serving.load.timer import PreciseTimer

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
REQUEST = b"POST /infer HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"


class Behaviour:
    """An HTTP server; `answer(n)` gives what the n-th request gets: bytes, seconds to wait, or None (closes)."""

    def __init__(self, answer):
        self.answer, self.requests, self.connections = answer, 0, 0

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self.server.close()

    async def serve(self, reader, writer):
        self.connections += 1
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                self.requests += 1
                found = self.answer(self.requests)
                if found is None:
                    break
                if isinstance(found, float):
                    await asyncio.sleep(found)
                    found = OK
                writer.write(found)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()


def loaded(answer, setting: Setting):
    """The result, and the server as it was left."""

    async def main():
        async with Behaviour(answer) as server:
            generator = Generator("127.0.0.1", server.port, lambda a, b: HttpClient(REQUEST, a, b), setting)
            await generator.connect()
            return await generator.run(), server

    return run(main())


def result(latencies=(), **fields) -> Result:
    found = {"setting": Setting(), "rows": 1, "seconds": 2.0, "answers": len(latencies), "errors": {}, **fields}
    return Result(latencies=np.sort(np.array(latencies, float)), **found)


def test_percentiles_are_those_of_the_sorted_latencies():
    found = result(np.arange(1, 1001) / 1000)
    assert [found.latency_ms(q) for q in (50, 90, 99, 99.9, 100)] == pytest.approx([500, 900, 990, 999, 1000])
    assert result([0.25]).latency_ms(99.9) == 250
    assert np.isnan(result().latency_ms(50))


def test_results_of_several_processes_add_up():
    setting = Setting(connections=5, rate=100)
    one = result([0.1, 0.3], rows=4, errors={"full": 2}, unanswered=1)
    found = merged([one, result([0.2], rows=4, errors={"full": 1, "gone": 1}, stopped=True)], setting)
    assert found.latencies.tolist() == [0.1, 0.2, 0.3]
    assert (found.answers, found.rows_per_second, found.errors, found.unanswered) == (3, 6.0, {"full": 3, "gone": 1}, 1)
    assert (found.failed, found.stopped, found.setting) == (5, True, setting)
    assert json.loads(json.dumps(found.as_dict()))["latency_ms"]["max"] == 300
    assert result().as_dict()["latency_ms"]["p50"] is None


def test_connections_and_rate_are_shared_among_processes():
    shares = split(Setting(connections=5, rate=100), 2)
    assert [(share.connections, share.rate) for share in shares] == [(3, 60), (2, 40)]
    assert [share.connections for share in split(Setting(connections=2), 8)] == [1, 1]
    with pytest.raises(HurtleError, match="processes must be at least 1, got 0"):
        split(Setting(), 0)


@pytest.mark.parametrize("wrong", [{"connections": 0}, {"rate": 0.0}, {"rate": -1.0}, {"seconds": 0.0}, {"warm_up": -1.0}])
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(HurtleError, match=next(iter(wrong))):
        Setting(**wrong)


@repeated
def test_a_closed_loop_has_as_many_requests_in_flight_as_connections():
    found, server = loaded(lambda n: 0.02, Setting(connections=4, seconds=0.4, warm_up=0.05))
    assert server.connections == 4
    assert found.answers == len(found.latencies)
    assert 4 * 5 <= found.answers <= 4 * 20
    assert 20 <= found.latency_ms(50) < 60
    assert (found.failed, found.stopped) == (0, False)


@repeated
def test_what_comes_in_the_warm_up_is_not_counted():
    found, server = loaded(lambda n: 0.01, Setting(seconds=0.2, warm_up=0.3))
    assert 0 < found.answers < server.requests * 0.6


@pytest.mark.slow
@repeated
def test_an_open_loop_counts_from_when_a_request_was_due():
    """One answer takes 0.3 s, the others none: a closed loop sees one slow request, yet all that were due then are late."""

    def answer(n):
        return 0.3 if n == 10 else OK

    closed, _ = loaded(answer, Setting(seconds=0.7, warm_up=0))
    assert 1 <= (closed.latencies > 0.1).sum() <= 4  # a busy machine may add to them
    found, _ = loaded(answer, Setting(rate=200, seconds=0.7, warm_up=0))
    late = (found.latencies > 0.1).sum()
    assert late > 200 * 0.2 * 0.5
    assert found.failed == 0
    assert 200 * 0.7 * 0.6 < found.answers < 200 * 0.7 * 1.4


@repeated
def test_requests_of_an_open_loop_that_get_no_answer_count_with_the_time_they_waited(monkeypatch):
    monkeypatch.setattr("hurtle.serving.load.generator.PATIENCE", 0.3)
    found, _ = loaded(lambda n: 60.0, Setting(connections=2, rate=100, seconds=0.3, warm_up=0))
    assert found.answers == 0
    assert found.unanswered == len(found.latencies) == found.failed
    assert 10 < found.unanswered < 60
    assert found.latency_ms(0.1) >= 300


def test_the_last_answer_ends_an_open_loop_though_the_event_loop_woke_it_too_early():
    ended = []

    class WokenEarly(Generator):
        async def _wait(self, seconds):
            await super()._wait(seconds if ended else seconds - 0.2)
            ended.append(self._done.is_set())

    async def main():
        async with Behaviour(lambda n: 0.2) as server:
            setting = Setting(connections=1, rate=1000, seconds=0.3, warm_up=0)
            generator = WokenEarly("127.0.0.1", server.port, lambda a, b: HttpClient(REQUEST, a, b), setting)
            await generator.connect()
            generator._random.expovariate = lambda rate: 1.0  # one request is due
            await generator.run()

    run(main())
    assert ended == [False, True]


@repeated
def test_errors_are_counted_by_what_the_server_says():
    refused = b'HTTP/1.1 429 Too Many\r\nContent-Length: 16\r\n\r\n{"error":"full"}'
    found, _ = loaded(lambda n: refused if n % 2 else 0.002, Setting(connections=2, seconds=0.3, warm_up=0))
    assert list(found.errors) == ["429 full"]
    assert abs(found.errors["429 full"] - found.answers) <= 4
    assert len(found.latencies) == found.answers > 10


@repeated
def test_a_connection_that_is_lost_is_an_error_and_is_opened_again():
    found, server = loaded(lambda n: None if n == 3 else 0.005, Setting(seconds=0.4, warm_up=0))
    assert server.connections == 2
    assert found.errors == {"the server closed the connection before it answered": 1}
    assert found.answers > 10


@repeated
def test_a_server_that_says_goodbye_after_each_answer_is_no_error():
    goodbye = OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    found, server = loaded(lambda n: goodbye, Setting(seconds=0.8, warm_up=0))
    assert found.errors == {}
    assert 2 <= found.answers <= server.connections <= found.answers + 2


@repeated
def test_what_is_not_http_is_an_error():
    found, _ = loaded(lambda n: b"hello\r\n\r\n", Setting(seconds=0.2, warm_up=0))
    assert all(error.startswith("not HTTP") for error in found.errors)
    assert found.failed


def test_a_server_that_goes_away_ends_the_run():
    async def main():
        async with Behaviour(lambda n: 0.005) as server:
            generator = Generator("127.0.0.1", server.port, lambda a, b: HttpClient(REQUEST, a, b), Setting(seconds=3600))
            await generator.connect()
            running = asyncio.create_task(generator.run())
            await asyncio.sleep(0.1)
            server.server.close()
            server.answer = lambda n: None
            return await running

    assert run(main()).stopped


@repeated
def test_a_timer_is_precise_to_a_part_of_a_millisecond():
    async def main():
        fired = asyncio.Event()
        timer = PreciseTimer(fired.set)
        late = []
        for wait in (0.0003, 0.0007, 0.0012, 0.000001, -1.0) * 10:
            began = time.perf_counter()
            timer.set(wait)
            await fired.wait()
            late.append(time.perf_counter() - began - max(wait, 0))
            fired.clear()
        timer.set(0.001)
        timer.close()
        await asyncio.sleep(0.01)
        assert not fired.is_set()
        return late

    late = sorted(run(main()))
    assert late[0] > -1e-5
    assert late[len(late) // 4] < 5e-4
