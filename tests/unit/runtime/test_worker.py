"""The thread worker: order, errors, closing."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from magnetar.errors import DiskFull
from magnetar.runtime.worker import ThreadWorker


def test_jobs_run_and_finish_in_order_on_one_other_thread() -> None:
    async def main() -> None:
        worker = ThreadWorker("test")
        ran: list[int] = []
        threads: set[int] = set()

        def job(number: int) -> int:
            ran.append(number)
            threads.add(threading.get_ident())
            return number

        finished: list[int] = []
        futures = [worker.run(job, n) for n in range(100)]
        for future in futures:
            future.add_done_callback(lambda done: finished.append(done.result()))
        assert await asyncio.gather(*futures) == list(range(100))
        await asyncio.sleep(0)
        assert ran == finished == list(range(100))
        assert len(threads) == 1
        assert threading.get_ident() not in threads
        await worker.close()

    asyncio.run(main())


def test_the_loop_goes_on_while_a_job_runs() -> None:
    async def main() -> None:
        worker = ThreadWorker("test")
        gate = threading.Event()
        waiting = worker.run(gate.wait, 10)
        await asyncio.sleep(0)
        assert not waiting.done()
        gate.set()
        assert await waiting is True
        await worker.close()

    asyncio.run(main())


def test_an_error_reaches_the_caller_and_the_worker_goes_on() -> None:
    async def main() -> None:
        worker = ThreadWorker("test")

        def fail() -> None:
            raise DiskFull("no space")

        failing, fine = worker.run(fail), worker.run(int, "3")
        with pytest.raises(DiskFull):
            await failing
        assert await fine == 3
        await worker.close()

    asyncio.run(main())


def test_close_lets_given_jobs_finish() -> None:
    async def main() -> None:
        worker = ThreadWorker("test-close")
        gate = threading.Event()
        futures: list[asyncio.Future[Any]] = [worker.run(gate.wait, 10), worker.run(int, "7")]
        closing = asyncio.ensure_future(worker.close())
        await asyncio.sleep(0)
        assert not closing.done()
        gate.set()
        await closing
        assert [future.result() for future in futures] == [True, 7]
        assert not [t for t in threading.enumerate() if t.name == "test-close"]

    asyncio.run(main())


def test_a_worker_that_was_never_used_has_no_thread() -> None:
    async def main() -> None:
        worker = ThreadWorker("test-unused")
        assert not [t for t in threading.enumerate() if t.name == "test-unused"]
        await worker.close()

    asyncio.run(main())


def test_a_caller_that_gave_up_disturbs_nobody() -> None:
    async def main() -> None:
        worker = ThreadWorker("test")
        gate = threading.Event()
        given_up, after = worker.run(gate.wait, 10), worker.run(int, "1")
        given_up.cancel()
        gate.set()
        assert await after == 1
        await worker.close()

    asyncio.run(main())
