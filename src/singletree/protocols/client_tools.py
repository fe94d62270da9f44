"""Tools that clients run themselves and declare by type only: their descriptions and schemas for the model.

Both vendors have such tools. Their own models know the schemas, so requests do not contain them; other models get
the schemas from here, as the vendors document them.

https://platform.openai.com/docs/guides/tools-local-shell, and there ``tools-shell``, ``tools-apply-patch`` and
``tools-tool-search``; https://platform.claude.com/docs/en/agents-and-tools/tool-use/bash-tool, and there
``text-editor-tool``, ``memory-tool`` and ``computer-use-tool``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from singletree.conversation import Tool

Schema = Mapping[str, Any]

_VERSION = re.compile(r"(?P<name>[a-z_]+)_(?P<date>[0-9]{8})")

_STRING: Schema = {"type": "string"}
_STRINGS: Schema = {"type": "array", "items": _STRING}
_INTEGER: Schema = {"type": "integer"}


def anthropic_tool(kind: str) -> Tool | None:
    """Return the tool of the type ``kind`` on Messages; None for a tool that clients do not run.

    An unlisted version is treated as the newest listed one before it, else as the oldest one.
    """
    wanted = _VERSION.fullmatch(kind)
    if wanted is None:
        return None
    dates = sorted(
        date for name, _, date in (kind.rpartition("_") for kind in ANTHROPIC) if name == wanted["name"]
    )
    if not dates:
        return None
    date = max((date for date in dates if date <= wanted["date"]), default=dates[0])
    return ANTHROPIC[f"{wanted['name']}_{date}"]


def _object(required: Sequence[str], **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _text(description: str) -> Schema:
    return {"type": "string", "description": description}


def _whole(description: str) -> Schema:
    return {"type": "integer", "description": description}


def _whole_numbers(description: str) -> Schema:
    return {"type": "array", "items": _INTEGER, "description": description}


def _choice(*values: str, description: str) -> Schema:
    return {"type": "string", "enum": list(values), "description": description}


_BASH = Tool(
    "bash",
    "Runs a command in a bash session on the user's machine. The session goes on from call to call.",
    _object(
        [],
        command=_text("The command. Required unless restart is true."),
        restart={"type": "boolean", "description": "True starts the session anew."},
    ),
)

_VIEW_RANGE = _whole_numbers("For view of a file: the first and the last line, from 1; -1 is the end.")


def _text_editor(name: str, *more_commands: str, insert_field: str) -> Tool:
    """Return a text editor; ``insert_field`` names the argument with the text for the command insert."""
    commands = ("view", "create", "str_replace", "insert", *more_commands)
    new_text = {"new_str": _text("For str_replace: the text that takes the place of old_str.")}
    if insert_field == "new_str":
        both = "For str_replace: the text in place of old_str. For insert: the text to put in."
        new_text = {"new_str": _text(both)}
    else:
        new_text["insert_text"] = _text("For insert: the text to put in.")
    return Tool(
        name,
        "Views, creates and edits text files. view shows a file with line numbers, or lists a folder; create writes a "
        "new file; str_replace replaces text that occurs exactly once; insert puts text behind a line."
        + (" undo_edit takes the last edit of a file back." if "undo_edit" in commands else ""),
        _object(
            ["command", "path"],
            command=_choice(*commands, description="What to do."),
            path=_text("Absolute path of a file or folder."),
            file_text=_text("For create: the content of the file."),
            old_str=_text("For str_replace: the text to replace, white space included."),
            **new_text,
            insert_line=_whole("For insert: the line behind which the text goes; 0 is the beginning."),
            view_range=_VIEW_RANGE,
        ),
    )


_MEMORY = Tool(
    "memory",
    "Keeps notes in files below /memories, which outlive the conversation. view shows a file, or lists a folder; "
    "create writes a file; str_replace replaces text; insert puts text behind a line; delete removes a file or folder; "
    "rename moves one. View /memories before you begin a task, and write down what a later conversation will need.",
    _object(
        ["command"],
        command=_choice(
            "view", "create", "str_replace", "insert", "delete", "rename", description="What to do."
        ),
        path=_text("Path below /memories. For all commands but rename."),
        view_range=_VIEW_RANGE,
        file_text=_text("For create: the content of the file."),
        old_str=_text("For str_replace: the text to replace."),
        new_str=_text("For str_replace: the text that takes its place."),
        insert_line=_whole("For insert: the line behind which the text goes; 0 is the beginning."),
        insert_text=_text("For insert: the text to put in."),
        old_path=_text("For rename: the path as it is."),
        new_path=_text("For rename: the path as it is to be."),
    ),
)

_ACTIONS = (
    "key",
    "type",
    "mouse_move",
    "left_click",
    "left_click_drag",
    "right_click",
    "middle_click",
    "double_click",
    "screenshot",
    "cursor_position",
)
_MORE_ACTIONS = ("left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait", "triple_click")
_POINT = _whole_numbers(
    "Pixels from the left and from the top, [x, y]: where to click, move, scroll or drag to."
)


def _computer(actions: Sequence[str], **more: Schema) -> Tool:
    return Tool(
        "computer",
        "Uses the screen, mouse and keyboard of a computer. Take a screenshot to see what an action did, and before "
        "you click to see where things are; click in the middle of an element.",
        _object(
            ["action"],
            action=_choice(*actions, description="What to do."),
            coordinate=_POINT,
            text=_text(
                "For type: the text. For key and hold_key: a key or combination such as Return or ctrl+s."
            ),
            **more,
        ),
    )


_SINCE_2025: Mapping[str, Schema] = {
    "start_coordinate": _whole_numbers("For left_click_drag: where it begins, [x, y]."),
    "scroll_direction": _choice("up", "down", "left", "right", description="For scroll."),
    "scroll_amount": _whole("For scroll: how many clicks of the wheel."),
    "duration": {"type": "number", "description": "For hold_key and wait: seconds."},
}
_REGION = _whole_numbers("For zoom: the part of the screen to show at full resolution, [x0, y0, x1, y1].")

OPENAI: Mapping[str, Tool] = {
    "local_shell": Tool(
        "local_shell",
        "Runs a command on the user's machine. The command is a list: the program, then its arguments.",
        _object(
            ["command"],
            command=_STRINGS,
            working_directory=_STRING,
            timeout_ms=_INTEGER,
            env={"type": "object", "additionalProperties": _STRING},
        ),
        strict=True,
    ),
    "shell": Tool(
        "shell",
        "Runs shell commands and returns what each of them prints.",
        _object(["commands"], commands=_STRINGS, timeout_ms=_INTEGER, max_output_length=_INTEGER),
        strict=True,
    ),
    "apply_patch": Tool(
        "apply_patch",
        "Creates, updates or deletes one file. `diff` is a V4A diff; for deleting it is empty.",
        _object(
            ["type", "path", "diff"],
            type={"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            path=_STRING,
            diff=_STRING,
        ),
        strict=True,
    ),
    "tool_search": Tool(
        "tool_search",
        "Finds tools that are not listed yet and makes them callable.",
        _object(["query"], query=_STRING),
    ),
}
"""Client tools of Responses, by type. ``responses.native_tools`` defines the items of their calls.

They are strict: a call of another form has no item type of its own, and openai-agents stops at one that it cannot read.
"""

ANTHROPIC: Mapping[str, Tool] = {
    "bash_20241022": _BASH,
    "bash_20250124": _BASH,
    "text_editor_20241022": _text_editor("str_replace_editor", "undo_edit", insert_field="new_str"),
    "text_editor_20250124": _text_editor("str_replace_editor", "undo_edit", insert_field="new_str"),
    # The vendor's documents say new_str here too, but its models write insert_text and clients read that.
    "text_editor_20250429": _text_editor("str_replace_based_edit_tool", insert_field="insert_text"),
    "text_editor_20250728": _text_editor("str_replace_based_edit_tool", insert_field="insert_text"),
    "memory_20250818": _MEMORY,
    "computer_20241022": _computer(_ACTIONS),
    "computer_20250124": _computer((*_ACTIONS, *_MORE_ACTIONS), **_SINCE_2025),
    "computer_20251124": _computer((*_ACTIONS, *_MORE_ACTIONS, "zoom"), **_SINCE_2025, region=_REGION),
}
"""Client tools of Messages, by type: a name and a version date. Their calls are ordinary ``tool_use`` blocks."""
