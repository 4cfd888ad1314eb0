"""smg, the real gateway, in front of an HTTP gateway: its workers with ``http://``."""

from pathlib import Path
from typing import Any

from smg_process import running_smg

REQUEST = {"model": "bytes", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}
PATH = "/v1/chat/completions"


async def test_answers_and_errors_are_those_of_the_gateway(gateway: Any, tmp_path: Path) -> None:
    async with running_smg(tmp_path, str(gateway.http.base_url)) as smg:
        whole = [(await http.post(PATH, json=REQUEST)).json() for http in (gateway.http, smg)]
        assert whole[0]["choices"][0]["message"]["content"] != ""
        assert whole[0]["choices"] == whole[1]["choices"]
        refused = [await http.post(PATH, json={**REQUEST, "logit_bias": {"999": 1}}) for http in (gateway.http, smg)]
        assert [each.status_code for each in refused] == [400, 400]
        assert refused[0].json() == refused[1].json()


async def test_text_passes_token_by_token(start_gateway: Any, tmp_path: Path) -> None:
    """Leaving an endless stream ends the request."""
    gateway = await start_gateway(seconds_per_step=0.005)
    body = {**REQUEST, "max_tokens": 4000, "stream": True, "ignore_eos": True}
    async with running_smg(tmp_path, str(gateway.http.base_url)) as smg:
        async with smg.stream("POST", PATH, json=body) as response:
            assert response.status_code == 200
            events = response.aiter_lines()
            while '"content":"' not in (line := await anext(events)) or '"content":""' in line:
                pass
            assert gateway.engine.stats().running == 1
        await gateway.until(lambda stats: stats.requests == 0)
