"""``singletree doctor``: what it reports of a model before it is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prompts.template_sources import ALTERNATING, COLLECTED, HERMES, XML, collected
from singletree import families
from singletree.cli import main
from singletree.drafting.diagnosis import Finding, diagnose
from singletree.errors import BadConfiguration
from singletree.server.models.chat_format import ChatFormat, choose_family, load_chat_format, template_alone
from singletree.server.settings.config import Config
from singletree.testing import byte_model

OFTEN = {"tool_call_parser": None, "reasoning_parser": None}


def speech(source: str, **flags: Any) -> ChatFormat:
    """Return the chat format of a model with that template."""
    template = template_alone(source)
    family, why = choose_family(Config(**flags), template)
    return ChatFormat(tokenizer=byte_model.byte_tokenizer(), template=template, family=family, why=why)


def found(source: str, **flags: Any) -> dict[str, Finding]:
    return {finding.topic: finding for finding in diagnose(speech(source, **flags), tokenizer=False)}


def run(*arguments: str) -> int:
    try:
        main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_a_model_of_a_known_family() -> None:
    findings = found(HERMES)
    assert findings["family"].found.startswith("qwen3: ")
    assert (
        findings["its calls"].found
        == '<tool_call>⏎{"name": "get_weather", "arguments": {"city": "Paris"}}⏎</tool_call>'
    )
    assert findings["reasoning goes back"].found == "in the field reasoning_content"
    assert findings["of earlier turns"].found == "kept once answered, kept in a tool loop"
    assert findings["thinking off"].found.startswith("enable_thinking=False → the prompt ends")
    assert findings["thinking off"].found.endswith("<think>⏎⏎</think>⏎⏎")
    assert findings["their arguments"].found.startswith("as a JSON object")
    assert findings["system inside"].level == "good"
    assert findings["read back"].found == "10 of 10 turns that the template wrote"
    assert findings["held to a call"].level == "good"
    assert not any(finding.level == "wrong" for finding in findings.values())


def test_a_call_in_the_instructions_that_the_family_does_not_read() -> None:
    asked = """{{ '<tool_call>{{"name": <name>, "arguments": <json>}}</tool_call>' }}"""
    findings = found(HERMES.replace("{% endfor %}<|im_end|>", "{% endfor %}" + asked + "<|im_end|>", 1))
    reported = findings["calls as instructed"]
    assert reported.level == "wrong"
    assert '<tool_call>{{"name": <name>, "arguments": <json>}}</tool_call>' in reported.matter
    assert '{"name": "get_weather", "arguments": {"city": "Paris"}}' in reported.matter
    assert "--chat-template" in reported.cure
    right = found(
        HERMES.replace(
            "{% endfor %}<|im_end|>",
            "{% endfor %}"
            + asked.replace("'<tool_call>{{", "'<tool_call>{").replace("}}</tool", "}</tool")
            + "<|im_end|>",
            1,
        )
    )
    assert right["calls as instructed"].level == "good"


def test_a_format_that_nobody_knows() -> None:
    findings = found(XML.replace("<function=", "<fn=").replace("</function>", "</fn>"))
    assert findings["family"].level == "wrong"
    assert "calls come back as text" in findings["family"].matter
    assert "families draft" in findings["family"].cure
    assert findings["held to a call"].level == "note"


def test_a_template_for_bare_chat() -> None:
    findings = found(ALTERNATING)
    assert findings["tools"].level == "wrong"
    assert "--chat-template" in findings["tools"].cure
    assert "their ids" not in findings


def test_reasoning_that_no_family_reads() -> None:
    findings = found(HERMES, reasoning_parser="none")
    assert findings["reasoning"].level == "wrong"
    assert "--reasoning-parser" in findings["reasoning"].cure


def test_a_family_named_by_hand_that_is_another() -> None:
    findings = found(HERMES, tool_call_parser="kimi_k2")
    assert findings["family"].found.startswith("qwen3+kimi_k2: by --tool-call-parser")
    assert findings["read back"].level == "wrong"
    assert "single" in findings["read back"].matter


def test_the_tokenizer_is_looked_at_too() -> None:
    made = load_chat_format(
        Config(engine="scripted", stability_off=("result_order",)), byte_model.byte_tokenizer()
    )
    findings = {finding.topic: finding for finding in diagnose(made)}
    assert findings["exact replay"].found == "between <|im_start|>assistant⏎ and <|im_end|>"
    assert findings["special tokens"].found == "3; none can be written by a client"
    assert findings["stability rules"].found.endswith("off: result_order")
    assert findings["window"].found == f"{byte_model.CONTEXT_WINDOW} tokens"


def test_special_tokens_that_a_client_could_write_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    made = load_chat_format(Config(engine="scripted"), byte_model.byte_tokenizer())
    monkeypatch.setattr(made.tokenizer, "guard", str)
    findings = {finding.topic: finding for finding in diagnose(made)}
    assert findings["special tokens"].level == "wrong"


def test_the_command_for_people(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert run("doctor", "scripted") == 0
    printed = capsys.readouterr().out
    assert "qwen3" in printed
    assert "what will not work" not in printed
    assert "[red" not in printed


def test_the_command_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bare.jinja"
    path.write_text(ALTERNATING)
    assert run("doctor", str(path), "--json") == 1
    value = json.loads(capsys.readouterr().out)
    assert (value["model"], value["works"]) == (str(path), False)
    (tools,) = (finding for finding in value["findings"] if finding["topic"] == "tools")
    assert tools == {
        "topic": "tools",
        "found": "not read",
        "level": "wrong",
        "matter": "the model is never told of any tool",
        "cure": "give a template that has it: --chat-template FILE",
    }
    path.write_text(HERMES)
    assert run("doctor", str(path), "--json") == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["./nowhere.gguf"], "no model at"),
        (["nowhere.jinja"], "No such file"),
        (["scripted", "--tool-call-parser", "nope"], "nope"),
        (["scripted", "--stability-off", "nope"], "unknown rule nope"),
        (["scripted", "--tool-call-parser", "hf"], "the checkpoint has no response_template"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("doctor", *arguments) == 1
    printed = capsys.readouterr().err.splitlines()
    assert says in printed[-1]
    assert printed[-1].startswith("singletree: ")


def test_every_family_of_the_collection_is_examined() -> None:
    if not COLLECTED.is_dir():
        pytest.skip("the collection of chat templates is not here")
    sources = {families.find(text).family.name: text for text in (p.read_text("utf-8") for p in collected())}
    for source in sources.values():
        try:
            made = speech(source)
        except BadConfiguration:
            continue  # needs variables that no client gives
        findings = diagnose(made, tokenizer=False)
        assert all(finding.matter and finding.cure for finding in findings if finding.level != "good")
        assert all(not finding.matter for finding in findings if finding.level == "good")
