"""A real Prometheus on a free port of this machine. Debian's package ``prometheus`` has it and promtool."""

import asyncio
import json
import re
import shutil
import urllib.error
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from wire.http_get import fetch

_PAUSE_S = 0.1
_LISTENS = re.compile(r'msg="Listening on" address=(\S+)')


def skip_without(program: str) -> pytest.MarkDecorator:
    """Skips a test on a machine without promtool or Prometheus."""
    reason = f"{program} is not installed (Debian: prometheus)"
    return pytest.mark.skipif(shutil.which(program) is None, reason=reason)


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus, by its API."""

    address: str

    async def ask(self, path: str, **parameters: str) -> Any:
        """Returns the API's data; fails the test with the API's message for a query that it does not accept."""
        place = f"/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            return json.loads(await asyncio.to_thread(fetch, self.address, path=place))["data"]
        except urllib.error.HTTPError as error:
            pytest.fail(f"{path} {parameters}: {error.read().decode()}")

    async def query(self, expression: str) -> list[Any]:
        """Returns the samples of an expression now."""
        return list((await self.ask("query", query=expression))["result"])

    async def scraped(self) -> list[Any]:
        """Waits until every target has been scraped, and returns the targets."""

        async def targets() -> list[Any]:
            found = (await self.ask("targets"))["activeTargets"]
            return [] if any(target["health"] == "unknown" for target in found) else list(found)

        return list(await until(targets))


@asynccontextmanager
async def running_prometheus(
    folder: Path, scrape_configs: Sequence[Any], rule_files: Sequence[Path] = ()
) -> AsyncIterator[Prometheus]:
    """Runs a Prometheus that scrapes and evaluates every 200 ms, and stores its data in ``folder``."""
    often = dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), "200ms")
    rules = [str(file) for file in rule_files]
    config = {"global": often, "rule_files": rules, "scrape_configs": list(scrape_configs)}
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    log = folder / "log"
    with log.open("w") as output:
        process = await asyncio.create_subprocess_exec(
            "prometheus",
            f"--config.file={folder / 'config.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            "--web.listen-address=127.0.0.1:0",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=output,
        )

    async def listening() -> re.Match[str] | None:
        assert process.returncode is None, log.read_text()
        found = _LISTENS.search(log.read_text())
        return found if "Server is ready to receive web requests" in log.read_text() else None

    try:
        yield Prometheus((await until(listening))[1])
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def until(find: Callable[[], Awaitable[Any]]) -> Any:
    """Waits until ``find`` returns something, and returns it; pytest's timeout is the limit."""
    while not (found := await find()):  # noqa: ASYNC110 - Prometheus sends no event
        await asyncio.sleep(_PAUSE_S)
    return found
