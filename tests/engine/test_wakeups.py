"""One call of an event loop wakes all tasks that another thread wants awake."""

import asyncio
import threading

from jkv.engine.service import wakeup_of_this_loop


def rung(thread_count, event_count):
    """How often the loop was called while threads rang for many events, each several times; all are then set."""
    calls = 0

    async def play():
        nonlocal calls
        loop, wakeup = asyncio.get_running_loop(), wakeup_of_this_loop()
        assert wakeup_of_this_loop() is wakeup
        events, call = [asyncio.Event() for _ in range(event_count)], loop.call_soon_threadsafe

        def counted(*args):
            nonlocal calls
            calls += 1
            return call(*args)

        loop.call_soon_threadsafe = counted

        def ring():
            for event in events * 3:
                wakeup.wake(event)

        threads = [threading.Thread(target=ring) for _ in range(thread_count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()  # the loop runs nothing meanwhile
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in events)), 60)
        events[0].clear()
        wakeup.wake(events[0])
        await asyncio.wait_for(events[0].wait(), 60)

    asyncio.run(play())
    return calls


def test_many_events_of_a_turn_call_the_loop_once():
    assert rung(1, 8) == rung(4, 50) == 2, "once for all, and once for the last"


def test_a_closed_loop_is_left_alone():
    wakeups = []

    async def play():
        wakeups.append((wakeup_of_this_loop(), asyncio.Event()))

    asyncio.run(play())
    (wakeup, event), *_ = wakeups
    wakeup.wake(event)
    assert not event.is_set()
