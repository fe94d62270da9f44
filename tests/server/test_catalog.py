"""What is served: which family is chosen and why, under which names, and what start-up says."""

from __future__ import annotations

from pathlib import Path

import pytest

from prompts.template_sources import XML
from singletree.errors import BadConfiguration, ModelNotFound
from singletree.prompts.template.chat_template import CHATML, ChatTemplate
from singletree.server.models.catalog import load_models
from singletree.server.models.chat_format import choose_family, disabled_rules, template_alone
from singletree.server.settings.config import Config
from singletree.testing import byte_model

QWEN3 = ChatTemplate(byte_model.CHAT_TEMPLATE)
BARE = ChatTemplate(CHATML)


def test_the_template_identifies_the_family() -> None:
    family, why = choose_family(Config(), QWEN3)
    assert family.name == byte_model.FAMILY
    assert "<tool_call>" in why


def test_a_template_for_words_alone_is_no_fault() -> None:
    family, why = choose_family(Config(), BARE)
    assert family.kind == "text"
    assert "WARNING" not in why


def test_an_unknown_template_is_reported_loudly() -> None:
    unknown = XML.replace("<function=", "<fn=").replace("</function>", "</fn>")
    family, why = choose_family(Config(), template_alone(unknown))
    assert family.kind == "text"
    assert "WARNING" in why
    assert "--tool-call-parser" in why


def test_flags_choose_each_half() -> None:
    both, why = choose_family(Config(reasoning_parser="nemotron_deci", tool_call_parser="kimi_k2"), BARE)
    assert both.name == "nemotron_deci+kimi_k2"
    assert why == "by --reasoning-parser and --tool-call-parser"
    calls, _ = choose_family(Config(tool_call_parser="kimi_k2"), QWEN3)
    assert (calls.reasoning is not None, calls.forms[0].opener) == (True, "<|tool_calls_section_begin|>")
    silent, _ = choose_family(Config(reasoning_parser="none"), QWEN3)
    assert (silent.reasoning, bool(silent.forms)) == (None, True)


@pytest.mark.parametrize("wrong", [{"tool_call_parser": "nope"}, {"reasoning_parser": "hermes"}])
def test_a_flag_that_names_no_family(wrong: dict[str, str]) -> None:
    with pytest.raises(BadConfiguration, match=next(iter(wrong.values()))):
        choose_family(Config(**wrong), QWEN3)  # type: ignore[arg-type]


def test_rules_are_switched_off_by_name() -> None:
    assert disabled_rules(Config()) == frozenset()
    assert disabled_rules(Config(strip_anthropic_preamble=False)) == {"billing_header"}
    assert disabled_rules(Config(stability_off=("result_order",))) == {"result_order"}
    with pytest.raises(BadConfiguration, match="unknown rule nope"):
        disabled_rules(Config(stability_off=("nope",)))


async def test_the_scripted_engine_needs_no_model() -> None:
    lines: list[str] = []
    loaded = await load_models(Config(engine="scripted", context_window=4096), lines.append)
    try:
        model = loaded.get("scripted")
        assert (model.context_window, model.family.name) == (4096, byte_model.FAMILY)
        assert loaded.get("") is model
        assert loaded.get("SCRIPTED[1m]") is model
        with pytest.raises(ModelNotFound, match="served: scripted"):
            loaded.get("gpt")
    finally:
        await loaded.close()
    assert [line.split()[0] for line in lines] == ["model", "template", "family", "engine"]


async def test_names_are_the_operators() -> None:
    loaded = await load_models(Config(engine="scripted", model_name=("a", "b/c")), print)
    assert (loaded.models[0].name, loaded.get("b/c").name) == ("a", "a")
    await loaded.close()


async def test_a_template_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text(CHATML)
    lines: list[str] = []
    loaded = await load_models(Config(engine="scripted", chat_template=path), lines.append)
    await loaded.close()
    assert str(path) in lines[1]
    for broken, says in ((tmp_path / "none", "No such file"), (tmp_path, "directory")):
        with pytest.raises(BadConfiguration, match=says):
            await load_models(Config(engine="scripted", chat_template=broken), print)
    path.write_text("{% if %}")
    with pytest.raises(BadConfiguration):
        await load_models(Config(engine="scripted", chat_template=path), print)
