"""What never reaches a prompt, or only in one way, because of how the parts are made: nothing acts when a request
comes, so there is nothing to switch off or to count. Each promise names the tests that hold it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Promise:
    """``tests`` are names of files below ``tests/`` and of functions in them."""

    says: str
    reason: str
    tests: tuple[str, ...]


_PREFIX = "server/test_prefix_stability.py::"

PROMISES = (
    Promise(
        "A cache mark changes nothing, wherever it stands.",
        "Protocols keep it aside (`extra`), where no template looks; that it turns a string into blocks is undone by "
        "the rule `text_blocks`.",
        (
            "protocols/test_messages_decode.py::test_cache_marks_are_kept_aside_and_are_no_difference",
            f"{_PREFIX}test_what_means_nothing_changes_no_token",
            f"{_PREFIX}test_a_cache_mark_that_moves_on_changes_no_token",
        ),
    ),
    Promise(
        "A system message in the middle of a conversation stays where it stands.",
        "Messages are written in the order in which they came: as system where the template takes one there, else as "
        "the user's. None goes to the head, which all later turns stand on (C1).",
        (
            f"{_PREFIX}test_nudges_stay_where_they_stand",
            "prompts/test_template_matrix.py::test_a_conversation_with_nudges_only_grows",
            "prompts/test_template_messages.py::test_system_and_developer_stay_where_they_stand",
            "prompts/test_template_messages.py::test_a_strict_template_gets_them_as_user_text_in_place",
        ),
    ),
    Promise(
        "Messages of one role behind each other are taken as they are, on every template.",
        "Where a template refuses them they are one message, and what is added later changes nothing before it (C36).",
        (
            f"{_PREFIX}test_messages_of_one_role_behind_each_other",
            "prompts/test_template_messages.py::test_neighbours_are_joined_where_the_template_refuses_them",
        ),
    ),
    Promise(
        "`tool_choice` changes no prompt; neither does `parallel_tool_calls`.",
        "A choice constrains what is generated. Tools that may not be called stay in the prompt (C6).",
        (
            "server/test_generation.py::test_the_tool_choice_never_changes_the_prompt",
            f"{_PREFIX}test_what_means_nothing_changes_no_token",
            f"{_PREFIX}test_what_means_nothing_on_openais_protocols",
        ),
    ),
    Promise(
        "`metadata`, `user`, cache keys, sampling and unknown fields change no prompt.",
        "A prompt is made of turns, tools and the settings of reasoning; nothing else of a request reaches a template.",
        (
            f"{_PREFIX}test_what_means_nothing_changes_no_token",
            f"{_PREFIX}test_what_means_nothing_on_openais_protocols",
        ),
    ),
    Promise(
        "Ids of calls change no prompt, but for models that read them.",
        "A template prints an id only where its model writes one itself; there it is given in the model's own form "
        "(C23).",
        (
            f"{_PREFIX}test_what_means_nothing_changes_no_token",
            "prompts/test_template_messages.py::test_kimi_ids_are_native_and_count_on",
        ),
    ),
    Promise(
        "Tools and their schemas stand in the client's own order, key by key, with nothing added.",
        "Definitions are kept as they came and printed once (C6).",
        (
            "prompts/test_template_content.py::test_tools_are_printed_in_the_clients_order",
            f"{_PREFIX}test_one_conversation_has_one_prompt_on_three_protocols",
        ),
    ),
    Promise(
        "A call's arguments stand in the model's own bytes.",
        "They travel as text, pinned to it where a template takes them as an object (C3).",
        (
            "prompts/test_template_messages.py::test_arguments_keep_the_models_bytes",
            "prompts/test_template_messages.py::test_arguments_taken_apart_keep_the_spelling_of_their_values",
            "protocols/test_messages_decode.py::test_tool_input_keeps_the_clients_spelling",
        ),
    ),
)
