"""Executors: what runs when, in which batches, on which thread; cancelled, late and failing requests."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving_helpers import LIMIT, Answers, Doubler, Gated, request, run

from hurtle.errors import HurtleError, ServingError
from hurtle.serving.executors import Inline, Queued
from hurtle.serving.lanes import Job


def submit(executor, answers, value=1.0, rows=1, **fields):
    job = Job(request(value, rows, **fields), lambda job: answers.append((value, job.result)), rows)
    executor.submit(job)
    return job


def values(answers):
    return [(value, float(result["y"][0, 0])) for value, result in answers]


def test_inline_answers_before_submit_returns():
    async def main():
        executor, answers = Inline(Doubler), []
        submit(executor, answers, 3.0)
        assert values(answers) == [(3.0, 6.0)]
        executor.close()
        assert executor.backend.closed

    run(main())


@pytest.mark.parametrize("lanes", [0, 1])
def test_requests_of_one_loop_pass_are_one_call_but_the_first_when_it_may_be_alone(lanes):
    async def main():
        executor, answers = Queued(Doubler, lanes, batch_size=64), Answers()

        async def burst(count):
            answers.clear()
            for n in range(count):
                submit(executor, answers, float(n), rows=1 + n % 3)
            await answers.wait(count)
            assert values(answers) == [(n, 2.0 * n) for n in range(count)]

        await burst(10)
        assert executor.backend.calls == [1, 18]  # nobody could know that more would come
        await burst(10)
        await burst(1)
        assert executor.backend.calls[2:] == [19, 1]
        await burst(2)
        assert executor.backend.calls[4:] == [1, 2]
        executor.close()

    run(main())


def test_one_client_alone_is_not_looked_at_each_time_and_a_crowd_is_noticed_soon():
    async def main():
        executor, answers = Queued(Doubler, 0, batch_size=64), Answers()

        async def burst(size):
            before, looks = len(executor.backend.calls), 0
            for _ in range(size):
                submit(executor, answers, 1.0)
                looks += executor._planned
            for _ in range(3):
                await asyncio.sleep(0)
            return executor.backend.calls[before:], looks

        looks = [(await burst(1))[1] for _ in range(26)]
        assert looks == [1] * 8 + ([0] * 8 + [1]) * 2
        assert (await burst(30))[0] == [1] * 9 + [21]  # the ninth is looked after: the rest of the pass waits, and is fused
        assert (await burst(30))[0] == [30]
        assert await burst(1) == ([1], 1)
        executor.close()

    run(main())


def test_a_call_has_at_most_batch_size_rows_and_a_larger_request_runs_alone():
    async def main():
        executor, answers = Queued(Doubler, 0, batch_size=4), Answers()
        for rows in (3, 1, 3, 9, 2, 2):
            submit(executor, answers, 1.0, rows)
        await answers.wait(6)
        assert executor.backend.calls == [3, 4, 9, 4]

    run(main())


def test_a_large_request_does_not_hold_up_the_event_loop():
    async def main():
        backend, answers = Gated(), Answers()
        backend.gate = threading.Event()
        executor = Queued(lambda: backend, 0, batch_size=4, large=4)
        submit(executor, answers, 1.0, rows=5)
        submit(executor, answers, 2.0, rows=2)
        late = submit(executor, answers, 3.0, rows=5, deadline=time.monotonic() + 0.1)
        dropped = submit(executor, answers, 4.0, rows=5)
        assert executor.queued == 3  # the first runs on a thread; the others wait for the backend, not the loop
        executor.cancel(dropped)
        await answers.wait(1)  # the late one, while the first still runs
        backend.gate.set()
        await answers.wait(3)
        assert [value for value, _ in answers] == [3.0, 1.0, 2.0]
        assert late.result.reason == "deadline_exceeded"
        assert float(answers[1][1]["y"][4, 2]) == 2
        assert executor.backend.calls == [5, 2]
        executor.close()

    run(main())


class LargeGated(Doubler):
    """Large calls wait until the gate opens."""

    def __init__(self, path=None, parameters=None):
        super().__init__(path, parameters)
        self.entered, self.gate = threading.Event(), threading.Event()
        self.was_closed = False

    def _run(self, inputs):
        if len(inputs["x"]) > 4:
            self.entered.set()
            assert self.gate.wait(LIMIT)
            self.was_closed = self.closed
        return super()._run(inputs)


def test_a_large_request_takes_no_thread_that_others_need_and_none_that_the_exit_waits_for():
    async def main():
        executors, answers = [Queued(LargeGated, 0, batch_size=4, large=4) for _ in range(3)], Answers()
        loop, pool = asyncio.get_running_loop(), ThreadPoolExecutor(1)
        loop.set_default_executor(pool)
        before = set(threading.enumerate())
        for executor in executors:
            submit(executor, answers, rows=5)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 7), LIMIT) == 7
        made = set(threading.enumerate()) - before - pool._threads
        assert [thread.daemon for thread in made] == [True] * 3
        for executor in executors:
            executor.backend.gate.set()
        await answers.wait(3)
        for executor in executors:
            executor.close()
            assert executor.backend.closed

    run(main())


def test_a_backend_is_not_closed_while_a_large_request_runs_that_nobody_waits_for():
    async def main():
        executor, answers = Queued(LargeGated, 0, batch_size=4, large=4), Answers()
        backend = executor.backend
        job = submit(executor, answers, rows=5)
        assert await asyncio.to_thread(backend.entered.wait, LIMIT)
        executor.cancel(job)
        closing = asyncio.create_task(asyncio.to_thread(executor.close))
        done, _ = await asyncio.wait([closing], timeout=0.1)
        assert not done
        assert not backend.closed
        backend.gate.set()
        await asyncio.wait_for(closing, LIMIT)
        assert (backend.closed, backend.was_closed, answers) == (True, False, [])

    run(main())


def test_worker_runs_one_request_a_call_on_lanes_of_its_own():
    made, both = [], threading.Barrier(2)  # which no call passes alone

    class Together(Doubler):
        def _run(self, inputs):
            both.wait(LIMIT)
            return super()._run(inputs)

    def make():
        made.append(Together())
        return made[-1]

    async def main():
        executor, answers = Queued(make, lanes=2), Answers()
        for n in range(4):
            submit(executor, answers, float(n))
        await answers.wait(4)
        assert [backend.calls for backend in made] == [[1, 1], [1, 1]]
        assert all(len(backend.threads) == 1 for backend in made)
        executor.close()
        assert all(backend.closed for backend in made)

    run(main())


def test_an_idle_lane_does_not_wait_for_more():
    async def main():
        executor, answers = Queued(Doubler, 1, batch_size=64, batch_timeout=3600.0), Answers()
        submit(executor, answers)
        await answers.wait(1)
        executor.close()

    run(main())


@pytest.mark.parametrize("timeout", [3600.0, 0.02], ids=["a full batch", "the timeout"])
def test_a_lane_that_comes_back_waits_for_more_until_the_timeout_or_a_full_batch(timeout):
    async def main():
        backend, answers = Gated(), Answers()
        backend.gate = threading.Event()
        executor = Queued(lambda: backend, 1, batch_size=4, batch_timeout=timeout)
        submit(executor, answers)
        while not backend.calls:
            await asyncio.sleep(0.001)
        submit(executor, answers)  # waits while the first runs, and then for more
        backend.gate.set()
        await answers.wait(1)
        if timeout < 1:
            await answers.wait(2)
            assert backend.calls == [1, 1]
        else:
            await asyncio.sleep(0.05)
            assert len(answers) == 1
            for _ in range(3):
                submit(executor, answers)
            await answers.wait(5)
            assert backend.calls == [1, 4]
        executor.close()

    run(main())


@pytest.mark.parametrize("lanes", [0, 1])
def test_one_bad_request_of_a_batch_fails_alone(lanes):
    async def main():
        executor, answers = Queued(Doubler, lanes, batch_size=64), Answers()
        for n in (1.0, -1.0, 3.0):
            submit(executor, answers, n)
        await answers.wait(3)
        results = dict(answers)
        assert float(results[1.0]["y"][0, 0]) == 2
        assert float(results[3.0]["y"][0, 0]) == 6
        assert results[-1.0].reason == "internal"
        assert "x is negative" in str(results[-1.0])
        executor.close()

    run(main())


def test_a_backend_that_loses_results_is_found_out():
    class Forgetful(Doubler):
        def infer_batch(self, requests):
            return [{"y": requests[0].inputs["x"]}]

    async def main():
        executor, answers = Queued(Forgetful, 0, batch_size=64), Answers()
        submit(executor, answers, 1.0)
        submit(executor, answers, 2.0)
        await answers.wait(2)
        assert values(answers) == [(1.0, 2.0), (2.0, 4.0)]  # each alone

    run(main())


def test_a_full_queue_refuses_and_takes_again_when_it_has_run():
    async def main():
        executor, answers = Queued(lambda: Doubler(None, {"delay": 0.05}), 1, max_queue=2), Answers()
        submit(executor, answers)  # the lane is idle, and takes it
        waiting = submit(executor, answers)
        submit(executor, answers)
        with pytest.raises(ServingError, match="2 requests are waiting") as caught:
            submit(executor, answers)
        assert caught.value.reason == "resource_exhausted"
        executor.cancel(waiting)
        assert executor.queued == 1
        submit(executor, answers)
        await answers.wait(3)
        assert executor.queued == 0
        executor.close()

    run(main())


def test_cancelled_requests_are_not_run_and_not_answered():
    async def main():
        backend, answers = Gated(), Answers()
        backend.gate = threading.Event()
        executor = Queued(lambda: backend, 1, batch_size=64)
        running = submit(executor, answers, 1.0)
        while not backend.calls:
            await asyncio.sleep(0.001)
        waiting = [submit(executor, answers, float(n)) for n in (2, 3, 4)]
        executor.cancel(running)
        executor.cancel(waiting[1])
        backend.gate.set()
        await answers.wait(2)
        await asyncio.sleep(0.1)
        assert values(answers) == [(2.0, 4.0), (4.0, 8.0)]
        assert backend.calls == [1, 2]
        executor.close()

    run(main())


def test_a_deadline_that_passes_in_the_queue_is_answered_then_and_not_run():
    async def main():
        backend, answers = Gated(), Answers()
        backend.gate = threading.Event()
        executor = Queued(lambda: backend, 1)
        submit(executor, answers, 1.0)
        while not backend.calls:
            await asyncio.sleep(0.001)
        submit(executor, answers, 2.0, deadline=time.monotonic() + 0.05)
        submit(executor, answers, 3.0, deadline=time.monotonic() + 3600)
        await answers.wait(1)  # before the lane is free
        assert answers[0][1].reason == "deadline_exceeded"
        backend.gate.set()
        await answers.wait(3)
        assert executor.backend.calls == [1, 1]
        executor.close()

    run(main())


def test_what_nobody_waits_for_does_not_pile_up():
    async def main():
        executor, answers = Queued(lambda: Doubler(None, {"delay": 0.3}), 1, max_queue=4), Answers()
        submit(executor, answers)
        for _ in range(1000):
            job = submit(executor, answers)
            executor.cancel(job)
            assert job.request.inputs == {}
        assert len(executor._jobs) <= 65
        await answers.wait(1)
        executor.close()

    run(main())


@pytest.mark.parametrize("lanes", [0, 1])
def test_an_answer_that_cannot_be_delivered_costs_no_other_its_own(lanes):
    async def main():
        executor, answers = Queued(Doubler, lanes, batch_size=64), Answers()

        def fail(job):
            raise KeyError("broken transport")

        for n in range(4):
            executor.submit(Job(request(float(n)), fail if n < 2 else lambda job, n=n: answers.append((n, job.result))))
        await answers.wait(2)
        submit(executor, answers, 9.0)
        await answers.wait(3)
        assert values(answers) == [(2, 4.0), (3, 6.0), (9.0, 18.0)]
        executor.close()

    run(main())


def test_a_backend_that_panics_is_an_error_and_the_lane_lives_on():
    class Panic(BaseException):
        pass

    class Panics(Doubler):
        def _run(self, inputs):
            if inputs["x"][0, 0] == 3:
                raise Panic("index out of bounds")
            return super()._run(inputs)

    async def main():
        executor, answers = Queued(Panics, 1), Answers()
        submit(executor, answers, 3.0)
        submit(executor, answers, 4.0)
        await answers.wait(2)
        assert answers[0][1].reason == "internal"
        assert values(answers[1:]) == [(4.0, 8.0)]
        executor.close()

    run(main())


def test_a_deadline_that_has_passed_already_is_not_run():
    async def main():
        executor, answers = Queued(Doubler, 0, batch_size=64), Answers()
        submit(executor, answers, 1.0, deadline=time.monotonic() - 1)
        submit(executor, answers, 2.0)
        await answers.wait(2)
        assert {value: type(result) for value, result in answers} == {1.0: ServingError, 2.0: dict}
        assert executor.backend.calls == [1]

    run(main())


def test_what_a_backend_raises_when_made_is_raised_here():
    def make():
        raise HurtleError("no such file")

    for executor in (lambda: Inline(make), lambda: Queued(make, 0), lambda: Queued(make, 2)):
        with pytest.raises(HurtleError, match="no such file"):
            executor()
