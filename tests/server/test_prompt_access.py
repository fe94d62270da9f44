"""Who sees prompts on a server without a key: nobody whose name for it may be that of a web page."""

from __future__ import annotations

import pytest

from singletree.server.settings.config import Config

from .serving import serving
from .test_cross_origin import on

EVERYWHERE = "0.0.0.0"
PROMPTS = ["/v1/singletree/sessions", "/v1/singletree/sessions/s", "/inspect", "/inspect/api/server"]
PROMPTS += [
    "/inspect/api/sessions",
    "/inspect/api/turns/t/prompt",
    "/inspect/api/export?session=s",
    "/inspect/api/events",
]


@pytest.mark.parametrize("path", PROMPTS)
async def test_without_a_key_a_rebound_page_reads_no_prompts_wherever_the_server_listens(path: str) -> None:
    for address in (EVERYWHERE, "10.0.0.7", None):
        for listed in ((), ("*",)):
            async with serving(config=Config(host=EVERYWHERE, inspect=True, allowed_hosts=listed)) as served:
                for host in (
                    "page.example:8000",
                    "10.0.0.7:8000",
                    "localhost.page.example",
                    "",
                    "0.0.0.0:8000",
                ):
                    reply = await on(served, address).get(path, {"host": host, "origin": f"http://{host}"})
                    assert (reply.status, reply.json["error"]["code"]) == (403, "address_not_allowed"), host
                    assert "--api-key" in reply.body.decode()
                # The rest of the server does not show prompts.
                assert (await on(served, address).get("/health", {"host": "page.example:8000"})).status == 200


@pytest.mark.parametrize("path", ["/v1/singletree/sessions", "/inspect/api/sessions"])
async def test_prompts_are_shown_under_names_that_no_page_can_have(path: str) -> None:
    settings: list[tuple[Config, dict[str, str]]] = [
        (Config(host=EVERYWHERE, inspect=True), {}),
        (Config(host=EVERYWHERE, inspect=True, allowed_hosts=("gpu.lan",)), {"host": "gpu.lan:8000"}),
        (Config(host=EVERYWHERE, inspect=True, api_key=("k",)), {"host": "any.example", "x-api-key": "k"}),
    ]
    for config, headers in settings:
        async with serving(config=config) as served:
            names = [headers["host"]] if "host" in headers else ["localhost:8000", "127.0.0.1", "[::1]:8000"]
            for name in names:
                reply = await on(served, EVERYWHERE).get(path, {**headers, "host": name})
                assert reply.status == 200, name
