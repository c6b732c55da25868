"""One call of an event loop wakes all tasks that another thread rings for."""

import asyncio
import threading

from jkv.engine.bells import bell_of_this_loop


def rung(thread_count, event_count):
    """How often the loop was called while threads rang for many events, each several times; all are then set."""
    calls = 0

    async def play():
        nonlocal calls
        loop, bell = asyncio.get_running_loop(), bell_of_this_loop()
        assert bell_of_this_loop() is bell
        events, call = [asyncio.Event() for _ in range(event_count)], loop.call_soon_threadsafe

        def counted(*args):
            nonlocal calls
            calls += 1
            return call(*args)

        loop.call_soon_threadsafe = counted

        def ring():
            for event in events * 3:
                bell.ring(event)

        threads = [threading.Thread(target=ring) for _ in range(thread_count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()  # the loop runs nothing meanwhile
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in events)), 60)
        events[0].clear()
        bell.ring(events[0])
        await asyncio.wait_for(events[0].wait(), 60)

    asyncio.run(play())
    return calls


def test_many_events_of_a_turn_call_the_loop_once():
    assert rung(1, 8) == rung(4, 50) == 2, "once for all, and once for the last"


def test_a_closed_loop_is_left_alone():
    bells = []

    async def play():
        bells.append((bell_of_this_loop(), asyncio.Event()))

    asyncio.run(play())
    (bell, event), *_ = bells
    bell.ring(event)
    assert not event.is_set()
