"""Which script a prompt chooses, and what scripts may say about themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from engines.letters import decode, encode, plain
from singletree.errors import BadConfiguration
from singletree.testing.scripts import Script, ScriptBook, ScriptChooser, parse_script

USER, MODEL, END = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n"


def chooser() -> ScriptChooser:
    book = ScriptBook({name: name for name in "abc"}, encode)
    return ScriptChooser(book, Script("default"), encode, decode)


def chosen(prompt: str | Sequence[int]) -> str:
    ids = encode(prompt) if isinstance(prompt, str) else prompt
    return decode(chooser().choose(ids)[1].tokens)


def test_the_last_marker_counts() -> None:
    assert chosen("[[script:a]] and then [[script:b]] or so") == "b"
    assert chosen("[[script:a]] and then [[echo:x]]") == "x"


@pytest.mark.parametrize(
    "text", ["", "[[script:]]", "[[script:a", "[[gen:x]]", "[[script:../a]]", "script:a"]
)
def test_what_is_no_marker_chooses_the_default(text: str) -> None:
    assert chosen(f"{text} hello") == "default"


@pytest.mark.parametrize("distance", [0, 400, 509, 512, 3000, 60_000])
def test_a_marker_is_found_however_far_back(distance: int) -> None:
    assert chosen("x" * 1000 + "[[script:b]]" + "y" * distance) == "b"


def test_each_turn_plays_the_next_script_and_then_the_default() -> None:
    prompt = f"{USER}[[script:a,b,c]]{END}"
    for name in ("a", "b", "c", "default", "default"):
        assert chosen(prompt + MODEL) == name
        prompt += f"{MODEL}{name}{END}{USER}a result{END}"


def test_a_turn_that_a_server_writes_as_two_messages_counts_once() -> None:
    turn = f"{MODEL}a{END}{MODEL}\n{END}{USER}a result{END}"
    assert chosen(f"{USER}[[script:a,b,c]]{END}{turn}{MODEL}") == "b"
    assert chosen(f"{USER}[[script:a,b,c]]{END}{turn}{turn}{MODEL}") == "c"


def test_turns_before_the_marker_do_not_count() -> None:
    before = f"{USER}hi{END}{MODEL}hello{END}" * 5
    assert chosen(f"{before}{USER}[[script:a,b]]{END}{MODEL}") == "a"
    assert chosen(f"{before}{USER}[[script:a,b]]{END}{MODEL}x{END}{USER}y{END}{MODEL}") == "b"


def test_a_new_marker_begins_anew() -> None:
    first = f"{USER}[[script:a,b]]{END}{MODEL}a{END}"
    assert chosen(f"{first}{USER}[[script:c,a]]{END}{MODEL}") == "c"


def test_an_opened_thought_after_the_header_changes_nothing() -> None:
    first = f"{USER}[[script:a,b]]{END}{MODEL}a{END}{USER}r{END}"
    assert chosen(f"{first}{MODEL}<think>\n") == "b"


def test_a_header_that_is_only_spelled_out_does_not_count() -> None:
    read = plain(f"a file that says {MODEL} and {MODEL}")
    prompt = [*encode(f"{USER}[[script:a,b]]{END}{MODEL}a{END}{USER}"), *read, *encode(f"{END}{MODEL}")]
    assert chosen(prompt) == "b"


def test_results_in_a_row_hand_over_once() -> None:
    prompt = "[INST] [[script:a,b,c]][/INST]"
    assert chosen(prompt) == "a"
    prompt += "calls[TOOL_RESULTS]1[/TOOL_RESULTS][TOOL_RESULTS]2[/TOOL_RESULTS]"
    assert chosen(prompt) == "b"
    assert chosen(f"{prompt}call[TOOL_RESULTS]3[/TOOL_RESULTS]") == "c"


def test_a_long_conversation_counts_right() -> None:
    names = ",".join("abc" * 20)
    prompt = f"{USER}[[script:{names}]]{END}" + f"{MODEL}x{END}{USER}{'r' * 2000}{END}" * 40
    assert chosen(prompt + MODEL) == ("abc" * 20)[40]


def test_a_prompt_without_any_header_is_the_first_turn() -> None:
    assert chosen("[[script:a,b]] plain completion") == "a"


def test_options_are_read_from_the_first_line() -> None:
    script = parse_script(
        '#opts {"delay": 0.5, "chunk": 3, "stall_after": 4, "stall": 1, "end": false}\ntext', "x"
    )
    assert script == Script("text", delay=0.5, chunk=3, stall_after=4, stall=1, end=False)
    assert parse_script("#options\ntext", "x") == Script("#options\ntext")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("{", "not valid JSON"),
        ("[]", "object"),
        ('{"dealy": 1}', "unknown option 'dealy'; known: delay, chunk"),
        ('{"delay": -1}', "delay must be a number"),
        ('{"delay": true}', "delay must be a number"),
        ('{"fail_after": 1.5}', "fail_after must be a whole number"),
        ('{"end": 1}', "end must be true or false"),
        ('{"text": "x"}', "unknown option 'text'"),
    ],
)
def test_the_error_for_a_wrong_option_has_the_reason(options: str, reason: str) -> None:
    with pytest.raises(BadConfiguration, match=reason):
        parse_script(f"#opts {options}\ntext", "x")


def test_the_error_for_a_wrong_file_has_the_reason(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('["b"]')
    (tmp_path / "b.json").write_text("[1,")
    book = ScriptBook(tmp_path, encode)
    with pytest.raises(BadConfiguration, match=r"a\.json.*not a list of token ids"):
        book.get("a")
    with pytest.raises(BadConfiguration, match=r"b\.json.*not valid JSON"):
        book.get("b")
    with pytest.raises(BadConfiguration, match="no folder of scripts"):
        ScriptBook(tmp_path / "none", encode)
