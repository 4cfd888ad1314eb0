"""A service with a page of metrics."""

import pytest

from penstock.scheduler.testing.fake_executor import FakeExecutor


@pytest.fixture
async def metered(start_service):
    """A service with a page of metrics, whose outputs take a while."""
    executor = FakeExecutor(vocab_size=258, next_token=lambda history, sampling: ord("a"), seconds_per_step=0.002)
    return await start_service(executor, metrics_listen="127.0.0.1:0")
