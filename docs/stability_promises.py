"""List the differences between requests that never reach a prompt because of how the code is built.

Nothing acts on a request for them, so there is nothing to switch off or to count. Each promise names its tests.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Promise:
    """A promise, the reason why it holds, and its tests: ``file::function`` below ``tests/``."""

    statement: str
    reason: str
    tests: tuple[str, ...]


_PREFIX = "server/test_prefix_stability.py::"

PROMISES = (
    Promise(
        "A cache mark changes nothing, wherever it is.",
        "Protocols keep it in `extra`, which no template sees. The mark turns a string into blocks; the rule "
        "`text_blocks` undoes that.",
        (
            "protocols/test_messages_decode.py::test_cache_marks_are_kept_aside_and_are_no_difference",
            f"{_PREFIX}test_what_means_nothing_changes_no_token",
            f"{_PREFIX}test_a_cache_mark_that_moves_on_changes_no_token",
        ),
    ),
    Promise(
        "A system message in the middle of a conversation stays in its place.",
        "Messages are rendered in the order in which they came: as system messages where the template takes them, "
        "else as user messages. None moves to the head of the prompt, because all later turns depend on the head (C1).",
        (
            f"{_PREFIX}test_nudges_stay_where_they_stand",
            "prompts/test_template_matrix.py::test_a_conversation_with_nudges_only_grows",
            "prompts/test_template_messages.py::test_system_and_developer_stay_where_they_stand",
            "prompts/test_template_messages.py::test_a_strict_template_gets_them_as_user_text_in_place",
        ),
    ),
    Promise(
        "Adjacent messages of one role are accepted on every template.",
        "Assistant messages become one turn by the rule `assistant_messages`. Others stay as they are; if the template "
        "refuses them, they are joined into one message, and a message added later changes nothing before it (C36).",
        (
            f"{_PREFIX}test_messages_of_one_role_behind_each_other",
            "prompts/test_template_messages.py::test_neighbours_are_joined_where_the_template_refuses_them",
        ),
    ),
    Promise(
        "`tool_choice` and `parallel_tool_calls` change no prompt.",
        "They constrain what is generated. Tools that may not be called stay in the prompt (C6).",
        (
            "server/test_generation.py::test_the_tool_choice_never_changes_the_prompt",
            f"{_PREFIX}test_what_means_nothing_changes_no_token",
            f"{_PREFIX}test_what_means_nothing_on_openais_protocols",
        ),
    ),
    Promise(
        "`metadata`, `user`, cache keys, sampling and unknown fields change no prompt.",
        "A prompt has turns, tools and the settings for reasoning. Nothing else in a request reaches a template.",
        (
            f"{_PREFIX}test_what_means_nothing_changes_no_token",
            f"{_PREFIX}test_what_means_nothing_on_openais_protocols",
        ),
    ),
    Promise(
        "Ids of calls change no prompt, except for models that read them.",
        "A template prints an id only if its model writes ids itself; the id then has the model's own form (C23).",
        (
            f"{_PREFIX}test_what_means_nothing_changes_no_token",
            "prompts/test_template_messages.py::test_kimi_ids_are_native_and_count_on",
        ),
    ),
    Promise(
        "Tools and their schemas keep the client's order, key by key, with nothing added.",
        "Definitions are stored as they came and serialized once (C6).",
        (
            "prompts/test_template_content.py::test_tools_are_printed_in_the_clients_order",
            f"{_PREFIX}test_one_conversation_has_one_prompt_on_three_protocols",
        ),
    ),
    Promise(
        "The arguments of a call keep the bytes that the model wrote.",
        "They are kept as text, also where a template takes an object (C3). Where a client parsed them and serialized "
        "them again (`input` on Messages, custom and native items on Responses, and JSON without any space, which is "
        "what JavaScript writes), the order of keys and the form of numbers are kept; separators and escapes are the "
        "template's.",
        (
            "prompts/test_template_messages.py::test_arguments_keep_the_models_bytes",
            "prompts/test_template_messages.py::test_arguments_taken_apart_keep_the_spelling_of_their_values",
            "protocols/test_messages_decode.py::test_tool_input_keeps_the_order_of_keys_and_the_spelling_of_numbers",
            "protocols/test_client_json.py::test_text_without_spaces_is_what_javascript_wrote",
        ),
    ),
    Promise(
        "A generated turn that comes back whole or in part is rendered as the model wrote it.",
        "Missing reasoning, text or calls, reasoning inside the text, several messages and another form of the "
        "arguments are not edits; changed words are. [Serving](serving.md#which-turns-are-the-same) lists which turns "
        "are the same (C3, C5).",
        (
            "server/test_partial_turns.py::test_what_comes_back_in_part_is_the_turn_as_written",
            "server/test_partial_turns.py::test_a_turn_with_other_words_is_rendered_as_edited",
            "server/test_partial_turns.py::test_what_was_cleared_is_not_given_back",
            "prompts/test_json_values.py::test_a_round_trip_is_no_edit",
        ),
    ),
    Promise(
        "No prompt holds reasoning of another conversation.",
        "If several generated turns fit a returned one, its capsules decide. Without capsules it gets reasoning back "
        "only if all of them have the same.",
        (
            "server/test_rival_turns.py::test_without_reasoning_neither_gets_a_thought_that_is_not_certain",
            "server/test_rival_turns.py::test_each_has_its_own_thoughts_where_capsules_come_along",
            "server/test_rival_turns.py::test_a_capsule_counts_more_than_what_is_remembered_in_its_place",
        ),
    ),
    Promise(
        "Reasoning that a client leaves out is printed wherever the template prints earlier reasoning.",
        "It is restored in every remembered turn, and the template decides what of it is printed.",
        (
            "server/test_partial_turns.py::test_earlier_reasoning_is_given_back_where_the_template_prints_it",
            "server/test_partial_turns.py::test_earlier_reasoning_is_not_printed_where_the_template_drops_it",
        ),
    ),
)
