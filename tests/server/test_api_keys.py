"""Which keys are separate, what the start tells about it, and which keys are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from singletree.engines.abilities import ABILITIES
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.server.settings.config import Config

from .carrying import LAYOUT
from .owning import ADMIN, client, tenants
from .serving import MODEL, serving
from .test_owners import QUESTION, SCRIPTS, chat


async def test_the_start_reports_that_keys_are_separate() -> None:
    async with tenants() as many:
        lines = many.served.service.describe_owners()
        many.served.engine._info = replace(many.served.engine.info(), salts=False)
        warned = many.served.service.describe_owners()
    assert ["2, each with a memory of its own; --share-between-keys" in line for line in lines] == [True]
    assert warned[0] == lines[0]
    assert warned[1].startswith(f"WARNING    the engine of {MODEL} cannot keep the prompts of keys apart")
    apart = {name for name, engine in ABILITIES.items() if engine.salts}
    assert ABILITIES.keys() - apart == {"llama-server", "tensorrt-llm"}


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        ({"api_key": ("k", "k")}, ["k"]),
        ({"api_key": (), "admin_key": ("o",)}, ["o"]),
        ({"api_key": ("k",), "admin_key": ("o",)}, ["k", "o"]),
    ],
)
async def test_one_key_beside_the_operators_is_no_tenant(flags: dict[str, Any], keys: list[str]) -> None:
    async with serving(SCRIPTS, config=Config(**flags), memory=TurnMemory(2**20), layout=LAYOUT) as served:
        assert served.service.keys.owners == ()
        for key in keys:
            await chat(client(served, key), QUESTION, **{"x-session-id": "main"})
        assert (await client(served, "").get("/v1/models")).status == 401
        listed = (await client(served, keys[0]).get("/v1/singletree/sessions")).json["data"]
        assert [each["id"] for each in listed] == ["main"]


def test_the_operators_key_is_not_a_tenants() -> None:
    with pytest.raises(Exception, match="--admin-key and --api-key have 1 key in common"):
        Config(api_key=("k", ADMIN), admin_key=(ADMIN,))
    with pytest.raises(Exception, match="--admin-key is empty"):
        Config(admin_key=(" ",))
