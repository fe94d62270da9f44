"""Finds out what a chat template reads. See ``template_reads`` for the questions; here they are put to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from jinja2 import meta, nodes

from singletree.prompts.template_reads import (
    CLOCK,
    EFFORT_VARIABLES,
    EFFORTS,
    HISTORY_SWITCHES,
    IMAGES,
    REASONING_FIELDS,
    STANDARD_VARIABLES,
    SWITCHES,
    Message,
    Reads,
    ReasoningField,
    Render,
    put_reasoning,
)
from singletree.prompts.written import read_object

_ID = "functions.qtool:0"
"""Kimi's templates print this instead of the name."""

_NINE = "probe0001"
_ARGUMENTS = '{"qkey":  "qvalue"}'
"""Two spaces: a template that prints its own JSON instead of the string has one."""

_FUNCTION: Message = {
    "name": "qtool",
    "description": "qdescription",
    "parameters": {"type": "object", "properties": {"qkey": {"type": "string", "description": "qmeaning"}}},
}
_TOOL: Message = {"type": "function", "function": _FUNCTION}


def probe(render: Render, tree: nodes.Template) -> Reads:
    """What the template reads.

    Args:
        render: renders messages with further context as keyword arguments; may raise anything.
        tree: the template's syntax tree.
    """
    return _Probe(render, tree).reads()


def _user(text: str = "quser") -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str | None = "qanswer", **fields: Any) -> Message:
    return {"role": "assistant", "content": text, **fields}


def _system(text: str = "qsystem") -> Message:
    return {"role": "system", "content": text}


class _Probe:
    def __init__(self, render: Render, tree: nodes.Template) -> None:
        self._render = render
        self._variables = frozenset(meta.find_undeclared_variables(tree))
        self._names = {str(n.value) for n in tree.find_all(nodes.Const)} | {
            n.attr for n in tree.find_all(nodes.Getattr)
        }
        self._prints_time = any(name.name == CLOCK for name in tree.find_all(nodes.Name))
        self._no_tools: list[Message] | None = None
        self._parts = False
        self._id = _ID
        self._arguments: Any = _ARGUMENTS
        self._empty: str | None = ""

    def reads(self) -> Reads:
        renders = self._find_base()
        longer = [_system(), _user(), _assistant(), _user("qlater")]
        system = self._prints(longer, "qsystem", "quser", "qanswer", "qlater")
        calls = self._find_calls()
        call_ids = self._call_ids(calls)
        tool = self._result()
        loop = [_user(), self._calling(), tool]
        results = calls and self._prints(loop, "quser", "qtool", "qresult")
        reasoning = self._reasoning(calls)
        image = self._image()
        return Reads(
            renders=renders,
            clock=self._prints_time,
            variables=self._variables - STANDARD_VARIABLES,
            reasoning=reasoning,
            text_beside_reasoning=calls and self._keeps_text(reasoning),
            tools=self._prints_tool(_TOOL),
            tools_always=self._no_tools is not None,
            needed_descriptions=self._needed_descriptions(),
            calls=calls,
            parallel_calls=calls and self._takes_parallel_calls(),
            text_with_calls=calls
            and self._prints([_user(), self._calling("qbefore"), tool], "qbefore", "qtool"),
            arguments="text" if isinstance(self._arguments, str) else "object",
            empty_content=self._empty,
            call_ids=call_ids,
            results=results,
            results_need_calls=results
            and not self._prints([_user(), _assistant(), tool], "qanswer", "qresult"),
            user_after_result=results and self._prints([*loop, _user("qlater")], "qresult", "qlater"),
            user_ends_loop=calls and self._forgets_loop(reasoning),
            system=system,
            system_runs=system
            and self._prints([_system(), _system("qrules"), _user()], "qsystem", "qrules", "quser"),
            system_inside=self._takes_system_inside(loop if results else []),
            consecutive_users=self._prints([_user(), _user("qlater")], "quser", "qlater"),
            consecutive_assistants=self._prints(
                [_user(), _assistant(), _assistant("qmore"), _user("qlater")], "qanswer", "qmore", "qlater"
            ),
            content_parts=self._parts,
            image=image,
            result_images=image is not None and results and self._takes_result_image(image),
            switches={name: values for name, values in SWITCHES.items() if self._takes_switch(name, values)},
            history_switches={
                name: keep for name, keep in HISTORY_SWITCHES.items() if name in self._variables
            },
            efforts={name: self._efforts(name) for name in EFFORT_VARIABLES if name in self._variables},
        )

    def _find_base(self) -> bool:
        """The simplest conversation decides how content is given, and what stands for having no tools."""
        for self._no_tools in (None, []):
            for self._parts in (False, True):
                if self._prints([_user()], "quser"):
                    return True
        return False

    def _try(self, messages: list[Message], **context: Any) -> str | None:
        if self._parts:
            messages = [
                m | {"content": [{"type": "text", "text": m["content"]}]}
                if isinstance(m["content"], str)
                else m
                for m in messages
            ]
        try:
            return self._render(messages, **({"tools": self._no_tools} | context))
        except Exception:  # a foreign template may fail in any way; that it does is the answer
            return None

    def _prints(self, messages: list[Message], *words: str, **context: Any) -> bool:
        """Whether every word comes out, first in this order, and no object is printed as Python would."""
        text = self._try(messages, **context)
        if text is None or "{'type'" in text:
            return False
        places = [text.find(word) for word in words]
        return -1 not in places and places == sorted(places)

    def _call(self, name: str = "qtool", arguments: Any = None) -> Message:
        function = {"name": name, "arguments": self._arguments if arguments is None else arguments}
        id = self._id.replace("qtool", name)
        return {"id": id, "type": "function", "function": function}

    def _calling(self, text: str | None = None, **fields: Any) -> Message:
        return _assistant(self._empty if text is None else text, tool_calls=[self._call()], **fields)

    def _result(self) -> Message:
        return {"role": "tool", "name": "qtool", "tool_call_id": self._id, "content": "qresult"}

    def _find_calls(self) -> bool:
        """Look for a form in which calls are printed, and keep it.

        Parsed arguments come first: that is what templates are written for, and some print a string that they
        are given as JSON although their model writes something else. Where both come out alike, the string is
        kept.
        """
        parsed = read_object(_ARGUMENTS, str)
        for self._id in (_ID, _NINE):
            for self._empty in ("", None):
                for self._arguments in (parsed, _ARGUMENTS):
                    text = self._printed_call()
                    if text is None:
                        continue
                    if self._arguments is parsed:
                        self._arguments = _ARGUMENTS
                        self._arguments = _ARGUMENTS if self._printed_call() == text else parsed
                    return True
        self._id, self._arguments, self._empty = _ID, _ARGUMENTS, ""
        return False

    def _printed_call(self) -> str | None:
        """The prompt with a call in it; None when the call is not there or is mangled."""
        text = self._try([_user(), self._calling(), self._result()])
        if text is None:
            text = self._try([_user(), self._calling()])
        if text is None or "qtool" not in text or (self._empty is None and "None" in text):
            return None
        if isinstance(self._arguments, str):
            return text if _ARGUMENTS in text else None
        whole = "qkey" in text and "qvalue" in text and '\\"qkey' not in text and "'qkey'" not in text
        return text if whole else None

    def _takes_parallel_calls(self) -> bool:
        calls = [self._call("qfirst"), self._call("qsecond")]
        text = self._try([_user(), _assistant(self._empty, tool_calls=calls), self._result(), self._result()])
        return text is not None and -1 < text.find("qfirst") < text.find("qsecond")

    def _call_ids(self, calls: bool) -> Literal["any", "nine", "kimi"]:
        if calls and (self._id == _NINE or not self._takes_id("q1")):
            self._id = _NINE
            return "nine"
        text = self._try([_user(), self._calling(), self._result()]) if calls else None
        return (
            "kimi" if text is not None and _ID in text and "<|tool_call_argument_begin|>" in text else "any"
        )

    def _takes_id(self, id: str) -> bool:
        call, result = self._call() | {"id": id}, self._result() | {"tool_call_id": id}
        return self._try([_user(), _assistant(self._empty, tool_calls=[call]), result]) is not None

    def _reasoning(self, calls: bool) -> ReasoningField | None:
        for place in REASONING_FIELDS:
            named = "thinking" if place == "part" else place
            if named in self._names and any(
                self._prints([_user(), message, *after], "qthought", **context)
                for message, after in self._reasoned(place, calls)
                for context in self._thinking_contexts()
            ):
                return place
        return None

    def _reasoned(self, place: ReasoningField, calls: bool) -> list[tuple[Message, list[Message]]]:
        """Turns with reasoning, and what follows them: in a tool loop, where most keep it, and elsewhere."""
        turns: list[tuple[Message, list[Message]]] = [(_assistant(), []), (_assistant(), [_user("qlater")])]
        if calls:
            turns = [
                (self._calling(), [self._result()]),
                (self._calling("qbefore"), [self._result()]),
                *turns,
            ]
        return [(put_reasoning(message, place, "qthought"), after) for message, after in turns]

    def _thinking_contexts(self) -> list[dict[str, Any]]:
        read = {name: values[0] for name, values in SWITCHES.items() if name in self._variables}
        return [{}, read] if read else [{}]

    def _keeps_text(self, place: ReasoningField | None) -> bool:
        if place is None:
            return False
        message = put_reasoning(self._calling("qbefore"), place, "qthought")
        return self._prints([_user(), message, self._result()], "qbefore", "qtool")

    def _forgets_loop(self, place: ReasoningField | None) -> bool:
        if place is None:
            return False
        kept = {name: keep for name, keep in HISTORY_SWITCHES.items() if name in self._variables}
        loop = [_user(), put_reasoning(self._calling(), place, "qthought"), self._result()]
        return any(
            self._prints(loop, "qthought", "qresult", **context)
            and not self._prints([*loop, _user("qlater")], "qthought", **context)
            for context in ({**kept, **switched} for switched in self._thinking_contexts())
        )

    def _prints_tool(self, tool: Message) -> bool:
        texts = (self._try(messages, tools=[tool]) for messages in ([_user()], [_system(), _user()]))
        return any(text is not None and "qtool" in text for text in texts)

    def _needed_descriptions(self) -> Literal["none", "tool", "parameter"]:
        bare = {"type": "object", "properties": {"qkey": {"type": "string"}}}
        without = {key: value for key, value in _FUNCTION.items() if key != "description"}
        if not self._prints_tool(_TOOL):
            return "none"
        if not self._prints_tool(_TOOL | {"function": _FUNCTION | {"parameters": bare}}):
            return "parameter"
        return "none" if self._prints_tool(_TOOL | {"function": without}) else "tool"

    def _takes_system_inside(self, loop: list[Message]) -> bool:
        """Printed where it stands, after any kind of turn, and not as if the assistant had said it."""
        before = [_user(), _assistant()]
        in_place = (
            self._prints([*before, _system(), _user("qlater")], "quser", "qanswer", "qsystem", "qlater")
            and self._prints([_user(), _system()], "quser", "qsystem")
            and self._prints([_system("qrules"), _user(), _system()], "qrules", "quser", "qsystem")
            and (not loop or self._prints([*loop, _system()], "qresult", "qsystem"))
        )
        as_assistant = [*before, _assistant("qsystem"), _user("qlater")]
        return in_place and self._try([*before, _system(), _user("qlater")]) != self._try(as_assistant)

    def _image(self) -> Mapping[str, Any] | None:
        text = {"type": "text", "text": "quser"}
        for image in IMAGES:
            if self._shows_image([{"role": "user", "content": [text]}], image):
                return image
        return None

    def _takes_result_image(self, image: Mapping[str, Any]) -> bool:
        result = self._result() | {"content": [{"type": "text", "text": "qresult"}]}
        return self._shows_image([_user(), self._calling(), result], image)

    def _shows_image(self, messages: list[Message], image: Mapping[str, Any]) -> bool:
        """Whether ``image`` at the end of the last message changes the prompt, other than as an object."""
        last = messages[-1]
        without = self._try(messages)
        text = self._try([*messages[:-1], last | {"content": [*last["content"], dict(image)]}])
        return text is not None and text != without and not any(mark in text for mark in ("'type'", '"type"'))

    def _takes_switch(self, name: str, values: tuple[Any, ...]) -> bool:
        """Whether every value passes and they do not all say the same."""
        if name not in self._variables:
            return False
        history = self._calling("qbefore") | dict.fromkeys(REASONING_FIELDS[:-1], "qthought")
        for messages in (
            [_user()],
            [_user(), history, self._result()],
            [_user(), _assistant(), _user("qlater")],
        ):
            texts = [self._try(messages, **{name: value}) for value in values]
            if None not in texts and len(set(texts)) > 1:
                return True
        return False

    def _efforts(self, name: str) -> tuple[str, ...]:
        """The words that pass. Where any word passes: those that the template names, and the usual three."""
        passing = [word for word in EFFORTS if self._try([_user()], **{name: word}) is not None]
        if self._try([_user()], **{name: "qeffort"}) is not None:
            passing = [word for word in passing if word in self._names or word in ("low", "medium", "high")]
        return tuple(passing)
