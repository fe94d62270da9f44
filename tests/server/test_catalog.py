"""What is served: which family is chosen and why, under which names, and what start-up says."""

from __future__ import annotations

from pathlib import Path

import pytest

from singletree.errors import BadConfiguration, ModelNotFound
from singletree.prompts.template.chat_template import CHATML, ChatTemplate
from singletree.server.models import byte_model, catalog
from singletree.server.models.config import Config
from singletree.server.models.served_models import load_models

QWEN3 = ChatTemplate(byte_model.CHAT_TEMPLATE)
BARE = ChatTemplate(CHATML)


def test_the_template_tells_the_family() -> None:
    family, why = catalog.choose_family(Config(), QWEN3)
    assert family.name == byte_model.FAMILY
    assert "<tool_call>" in why


def test_an_unknown_template_is_said_loudly() -> None:
    family, why = catalog.choose_family(Config(), BARE)
    assert family.kind == "text"
    assert "WARNING" in why
    assert "--tool-call-parser" in why


def test_flags_choose_each_half() -> None:
    both, why = catalog.choose_family(
        Config(reasoning_parser="nemotron_deci", tool_call_parser="kimi_k2"), BARE
    )
    assert both.name == "nemotron_deci+kimi_k2"
    assert why == "by --reasoning-parser and --tool-call-parser"
    calls, _ = catalog.choose_family(Config(tool_call_parser="kimi_k2"), QWEN3)
    assert (calls.reasoning is not None, calls.forms[0].opener) == (True, "<|tool_calls_section_begin|>")
    silent, _ = catalog.choose_family(Config(reasoning_parser="none"), QWEN3)
    assert (silent.reasoning, bool(silent.forms)) == (None, True)


@pytest.mark.parametrize("wrong", [{"tool_call_parser": "nope"}, {"reasoning_parser": "hermes"}])
def test_a_flag_that_names_no_family(wrong: dict[str, str]) -> None:
    with pytest.raises(BadConfiguration, match=next(iter(wrong.values()))):
        catalog.choose_family(Config(**wrong), QWEN3)  # type: ignore[arg-type]


def test_rules_are_switched_off_by_name() -> None:
    assert catalog.disabled_rules(Config()) == frozenset()
    assert catalog.disabled_rules(Config(strip_anthropic_preamble=False)) == {"billing_header"}
    assert catalog.disabled_rules(Config(stability_off=("result_order",))) == {"result_order"}
    with pytest.raises(BadConfiguration, match="unknown rule nope"):
        catalog.disabled_rules(Config(stability_off=("nope",)))


async def test_the_scripted_engine_needs_no_model() -> None:
    said: list[str] = []
    loaded = await load_models(Config(engine="scripted", context_window=4096), said.append)
    try:
        model = loaded.get("scripted")
        assert (model.context_window, model.family.name) == (4096, byte_model.FAMILY)
        assert loaded.get("") is model
        assert loaded.get("SCRIPTED[1m]") is model
        with pytest.raises(ModelNotFound, match="served: scripted"):
            loaded.get("gpt")
    finally:
        await loaded.close()
    assert [line.split()[0] for line in said] == ["model", "template", "family", "engine"]


async def test_names_are_the_operators() -> None:
    loaded = await load_models(Config(engine="scripted", model_name=("a", "b/c")), print)
    assert (loaded.models[0].name, loaded.get("b/c").name) == ("a", "a")
    await loaded.close()


async def test_a_template_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text(CHATML)
    said: list[str] = []
    loaded = await load_models(Config(engine="scripted", chat_template=path), said.append)
    await loaded.close()
    assert str(path) in said[1]
    for broken, says in ((tmp_path / "none", "No such file"), (tmp_path, "directory")):
        with pytest.raises(BadConfiguration, match=says):
            await load_models(Config(engine="scripted", chat_template=broken), print)
    path.write_text("{% if %}")
    with pytest.raises(BadConfiguration):
        await load_models(Config(engine="scripted", chat_template=path), print)
