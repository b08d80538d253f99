"""What is asked of gRPC goes on to its end, though nobody waits for it any more."""

from __future__ import annotations

import asyncio

import pytest

from worker.wire.reads import read_whole

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("ends_well", [True, False])
async def test_a_read_that_nobody_waits_for_goes_on_to_its_end(ends_well: bool) -> None:
    message = asyncio.get_running_loop().create_future()
    unretrieved: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unretrieved.append(context))
    ended = asyncio.Event()

    async def read() -> object:
        try:
            return await message
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await read_whole(read())
    assert not ended.is_set()
    assert not message.cancelled()
    if ends_well:
        message.set_result("late")
    else:
        message.set_exception(RuntimeError("the call is over"))
    await ended.wait()
    await asyncio.sleep(0)
    assert not unretrieved


async def test_what_is_read_and_what_fails_reaches_who_waits() -> None:
    async def read() -> str:
        return "a message"

    async def fail() -> str:
        raise RuntimeError("the call is over")

    assert await read_whole(read()) == "a message"
    with pytest.raises(RuntimeError, match="the call is over"):
        await read_whole(fail())
