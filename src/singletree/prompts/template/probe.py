"""Find the capabilities of a chat template by probe renders.

Each probe renders a short conversation of words that begin with q (``quser``, ``qresult``), and looks for them in the
output. ``capabilities`` explains each result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jinja2 import nodes

from singletree.conversation import ThinkingVariables
from singletree.prefixes import common_text_prefix
from singletree.prompts.template.capabilities import (
    CLOCK,
    EFFORTS,
    IMAGES,
    REASONING_FIELDS,
    STANDARD_VARIABLES,
    THINKING_VARIABLES,
    MessageDict,
    ReasoningField,
    Render,
    TemplateCapabilities,
    placeholder_arguments,
    put_reasoning,
)
from singletree.prompts.template.source_json import read_object
from singletree.prompts.template.template_loops import method_calls, nodes_below

_ID = "functions.qtool:0"
"""An id that holds the name of the tool: some templates print it instead of the name."""

NO_VARIABLES = ThinkingVariables()

_NINE = "probe0001"
_ARGUMENTS = '{"qkey":  "qvalue"}'
"""Arguments with two spaces: a template that prints its own JSON instead of this string prints one."""

_FUNCTION: MessageDict = {
    "name": "qtool",
    "description": "qdescription",
    "parameters": {"type": "object", "properties": {"qkey": {"type": "string", "description": "qmeaning"}}},
}
_TOOL: MessageDict = {"type": "function", "function": _FUNCTION}


def probe(
    render: Render, tree: nodes.Template, names: frozenset[str], known: ThinkingVariables = NO_VARIABLES
) -> TemplateCapabilities:
    """Return the capabilities of a template that reads the variables ``names``.

    It may read the ``known`` variables beside those that any template may.
    """
    return _Probe(render, tree, names, THINKING_VARIABLES.joined(known)).capabilities()


def _user(text: str = "quser") -> MessageDict:
    return {"role": "user", "content": text}


def _assistant(text: str | None = "qanswer", **fields: Any) -> MessageDict:
    return {"role": "assistant", "content": text, **fields}


def _system(text: str = "qsystem") -> MessageDict:
    return {"role": "system", "content": text}


def _constant_arguments(below: Sequence[nodes.Node], method: str) -> list[str]:
    """Return the constant texts that the template passes to the string method ``method``, in their order."""
    first = [call.args[0] for name, call in method_calls(below) if name == method and call.args]
    given = [each.value for each in first if isinstance(each, nodes.Const)]
    return list(dict.fromkeys(text for text in given if isinstance(text, str)))


class _Probe:
    def __init__(
        self, render: Render, tree: nodes.Template, names: frozenset[str], known: ThinkingVariables
    ) -> None:
        below = nodes_below(tree)
        self._render = render
        self._known = known
        self._variables = names
        self._history = {name: keep for name, keep in known.history if name in self._variables}
        self._names = {str(each.value) for each in below if isinstance(each, nodes.Const)}
        self._names |= {each.attr for each in below if isinstance(each, nodes.Getattr)}
        self._edges = {name: _constant_arguments(below, name) for name in ("startswith", "endswith")}
        self._prints_time = any(isinstance(each, nodes.Name) and each.name == CLOCK for each in below)
        self._no_tools: list[MessageDict] | None = None
        self._parts = False
        self._id = _ID
        self._arguments: Any = _ARGUMENTS
        self._takes_parsed = False
        self._empty: str | None = ""

    def capabilities(self) -> TemplateCapabilities:
        renders = self._find_base()
        longer = [_system(), _user(), _assistant(), _user("qlater")]
        system = self._prints(longer, "qsystem", "quser", "qanswer", "qlater")
        calls = self._find_calls()
        call_ids = self._call_ids(calls)
        tool = self._result()
        loop = [_user(), self._calling(), tool]
        results = calls and self._prints(loop, "quser", "qtool", "qresult")
        reasoning = self._reasoning(calls)
        text_beside_reasoning = calls and self._keeps_text(reasoning)
        image = self._image()
        uncalled = [_user(), _assistant(), tool, _assistant("qmore"), tool]
        heads = {
            (self._try(each) or "").partition("qresult")[0] for each in (uncalled, [*uncalled, *loop[1:]])
        }
        results_need_calls = results and (
            len(heads) > 1 or not self._prints(uncalled, "qanswer", "qresult", "qmore")
        )
        text_with_calls = calls and self._prints(
            [_user(), self._calling("qbefore"), tool], "qbefore", "qtool"
        )
        needs_calls = results_need_calls or (results and self._calls_keep_reasoning(reasoning))
        return TemplateCapabilities(
            renders=renders,
            clock=self._prints_time,
            variables=self._variables - STANDARD_VARIABLES,
            reasoning=reasoning,
            text_beside_reasoning=text_beside_reasoning,
            call_header=self._call_header() if needs_calls and not text_beside_reasoning else ("", ""),
            tools=self._prints_tool(_TOOL),
            tools_always=self._no_tools is not None,
            needed_descriptions=self._needed_descriptions(),
            calls=calls,
            parallel_calls=calls and self._takes_parallel_calls(),
            text_with_calls=text_with_calls,
            arguments="text" if isinstance(self._arguments, str) else "object",
            parsed_arguments=self._takes_parsed,
            empty_content=self._empty,
            call_ids=call_ids,
            results=results,
            results_need_calls=results_need_calls,
            unanswered=self._unanswered() if results and self._takes_parallel_calls() else "last",
            call_closers=self._call_closers() if needs_calls and text_with_calls else None,
            result_marks=self._result_marks(reasoning) if results and not results_need_calls else None,
            user_after_result=results and self._prints([*loop, _user("qlater")], "qresult", "qlater"),
            user_ends_loop=calls and (self._drops_loop_reasoning(reasoning) or self._moves_tools(loop)),
            system=system,
            system_alone=system and self._prints([_system()], "qsystem"),
            consecutive_systems=system
            and self._prints([_system(), _system("qrules"), _user()], "qsystem", "qrules", "quser"),
            system_inside=self._takes_system_inside(loop if results else []),
            consecutive_users=self._prints([_user(), _user("qlater")], "quser", "qlater"),
            consecutive_assistants=self._prints(
                [_user(), _assistant(), _assistant("qmore"), _user("qlater")], "qanswer", "qmore", "qlater"
            ),
            content_parts=self._parts,
            image=image,
            result_images=image is not None and results and self._takes_result_image(image),
            switches={
                name: (on, off)
                for name, on, off in self._known.switches
                if self._takes_switch(name, (on, off))
            },
            adaptive=any(self._is_adaptive(*each) for each in self._known.switches),
            history_switches=self._history,
            efforts={name: self._efforts(name) for name in self._known.efforts if name in self._variables},
            effort_flags={
                effort: name for effort, name in self._known.effort_flags if name in self._variables
            },
        )

    def _find_base(self) -> bool:
        """Find, with the simplest conversation, the form of content and the value for having no tools."""
        for self._no_tools in (None, []):
            for self._parts in (False, True):
                if self._prints([_user()], "quser"):
                    return True
        return False

    def _try(self, messages: list[MessageDict], **context: Any) -> str | None:
        if self._parts:
            messages = [
                m | {"content": [{"type": "text", "text": m["content"]}]}
                if isinstance(m["content"], str)
                else m
                for m in messages
            ]
        try:
            return self._render(messages, **({"tools": self._no_tools} | context))
        except Exception:  # a foreign template may fail in any way; None is the result then
            return None

    def _prints(self, messages: list[MessageDict], *words: str, **context: Any) -> bool:
        """Return whether all ``words`` are printed, first in this order, and no object is printed as Python would."""
        text = self._try(messages, **context)
        if text is None or "{'type'" in text:
            return False
        places = [text.find(word) for word in words]
        return -1 not in places and places == sorted(places)

    def _call(self, name: str = "qtool", arguments: Any = None) -> MessageDict:
        function = {"name": name, "arguments": self._arguments if arguments is None else arguments}
        id = self._id.replace("qtool", name)
        return {"id": id, "type": "function", "function": function}

    def _calling(self, text: str | None = None, **fields: Any) -> MessageDict:
        return _assistant(self._empty if text is None else text, tool_calls=[self._call()], **fields)

    def _result(self) -> MessageDict:
        return {"role": "tool", "name": "qtool", "tool_call_id": self._id, "content": "qresult"}

    def _find_calls(self) -> bool:
        """Find a form in which the template prints calls, and keep it for the other probes.

        Parsed arguments are tried first: templates are written for them, and some print a string as JSON although
        their model writes something else. Where both are printed alike, the string is kept.
        """
        parsed = read_object(_ARGUMENTS, str)
        for self._id in (_ID, _NINE):
            for self._empty in ("", None):
                for self._arguments in (parsed, _ARGUMENTS):
                    text = self._printed_call()
                    if text is None:
                        continue
                    if self._arguments is parsed:
                        self._takes_parsed = True
                        self._arguments = _ARGUMENTS
                        self._arguments = _ARGUMENTS if self._printed_call() == text else parsed
                    return True
        self._id, self._arguments, self._empty = _ID, _ARGUMENTS, ""
        return False

    def _printed_call(self) -> str | None:
        text = self._try([_user(), self._calling(), self._result()])
        if text is None:
            text = self._try([_user(), self._calling()])
        if text is None or "qtool" not in text or (self._empty is None and "None" in text):
            return None
        if isinstance(self._arguments, str):
            return text if _ARGUMENTS in text else None
        whole = "qkey" in text and "qvalue" in text and '\\"qkey' not in text and "'qkey'" not in text
        return text if whole else None

    def _call_header(self) -> tuple[str, str]:
        words = (self._try([_user(), _assistant(), _user("qlater")]) or "").partition("qanswer")[0]
        one, other = (
            _assistant(self._empty, tool_calls=[self._call(name) | {"id": _NINE}])
            for name in ("qtool", "qother")
        )
        result = self._result() | {"tool_call_id": _NINE}
        call = (self._try([_user(), one, result]) or "").partition("qtool")[0]
        same = common_text_prefix(words, call)
        again = self._try([_user(), one, result, other]) or ""
        # A header that counts calls is not known beforehand.
        return (
            (words[same:].strip(), call[same:])
            if again.partition("qother")[0].endswith(call[same:])
            else ("", "")
        )

    def _takes_parallel_calls(self) -> bool:
        calls = [self._call("qfirst"), self._call("qsecond")]
        text = self._try([_user(), _assistant(self._empty, tool_calls=calls), self._result(), self._result()])
        return text is not None and -1 < text.find("qfirst") < text.find("qsecond")

    def _unanswered(self) -> Literal["none", "last", "any"]:
        calls = [self._call("qfirst") | {"id": "qcall0001"}, self._call("qsecond") | {"id": "qcall0002"}]
        before = [_user(), _assistant(self._empty, tool_calls=calls)]
        one, other = (
            self._result() | {"tool_call_id": call["id"], "name": call["function"]["name"]} for call in calls
        )
        later: tuple[list[MessageDict], ...] = (
            [],
            [_user("qlater")],
            [_assistant(), _user("qlater")],
            [self._calling(), self._result(), _assistant()],
        )
        if not all(self._prints([*before, one, *more], "qfirst", "qsecond", "qresult") for more in later):
            return "none"
        return "last" if self._try([*before, one]) == self._try([*before, other]) else "any"

    def _call_ids(self, calls: bool) -> Literal["any", "nine"]:
        if calls and (self._id == _NINE or not self._takes_id("q1")):
            self._id = _NINE
            return "nine"
        return "any"

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

    def _reasoned(self, place: ReasoningField, calls: bool) -> list[tuple[MessageDict, list[MessageDict]]]:
        """Return turns with reasoning and the messages after: in a tool loop, where most keep it, and elsewhere."""
        turns = [(_assistant(), later) for later in ([], [_user("qlater")])]
        if calls:
            turns = [(self._calling(text), [self._result()]) for text in (None, "qbefore")] + turns
        return [(put_reasoning(message, place, "qthought"), after) for message, after in turns]

    def _thinking_contexts(self) -> list[dict[str, Any]]:
        read = {name: on for name, on, _ in self._known.switches if name in self._variables}
        return [{}, read] if read else [{}]

    def _keeps_text(self, place: ReasoningField | None) -> bool:
        if place is None:
            return False
        message = put_reasoning(self._calling("qbefore"), place, "qthought")
        return self._prints([_user(), message, self._result()], "qbefore", "qtool")

    def _drops_loop_reasoning(self, place: ReasoningField | None) -> bool:
        if place is None:
            return False
        loop = [_user(), put_reasoning(self._calling(), place, "qthought"), self._result()]
        return any(
            self._prints(loop, "qthought", "qresult", **context)
            and not self._prints([*loop, _user("qlater")], "qthought", **context)
            for context in ({**self._history, **switched} for switched in self._thinking_contexts())
        )

    def _moves_tools(self, loop: list[MessageDict]) -> bool:
        texts = (self._try(messages, tools=[_TOOL]) for messages in (loop, [*loop, _user("qlater")]))
        heads = {text and text.partition("quser")[0] for text in texts}
        return len(heads) > 1 and None not in heads

    def _calls_keep_reasoning(self, place: ReasoningField | None) -> bool:
        """Return whether the template drops the reasoning of a loop when a later turn has no calls."""
        if place is None:
            return False
        loop = [_user(), put_reasoning(self._calling(), place, "qthought"), self._result()]
        called = put_reasoning(self._calling("qanswer"), place, "qlater")
        answer = put_reasoning(_assistant(), place, "qlater")
        return any(
            self._prints([*loop, called, self._result()], "qthought", "qlater", **context)
            and not self._prints([*loop, answer, self._result()], "qthought", "qlater", **context)
            for context in self._thinking_contexts()
        )

    def _result_marks(self, place: ReasoningField | None) -> tuple[str, str] | None:
        """Return the prefix and suffix with which a user message is printed as a result, or keeps the loop open."""
        if place is None:
            return None
        loop = [_user(), put_reasoning(self._calling(), place, "qthought")]
        called = [_user(), _assistant()]
        result = self._result()
        for begin in self._edges["startswith"]:
            for end in self._edges["endswith"]:
                written = _user(f"{begin}\n{result['content']}\n{end}")
                text = self._try([*called, written])
                if (text is not None and text == self._try([*called, result])) or any(
                    self._prints([*loop, written], "qthought", "qresult", **context)
                    and not self._prints([*loop, _user()], "qthought", **context)
                    for context in self._thinking_contexts()
                ):
                    return begin, end
        return None

    def _call_closers(self) -> str | None:
        """Return the text between a turn's last argument and the text that also follows a turn without calls."""
        stand_in = placeholder_arguments("text" if isinstance(self._arguments, str) else "object", "qvalue")
        calling = _assistant("qanswer", tool_calls=[self._call(arguments=stand_in)])
        with_call = self._try([_user(), calling], add_generation_prompt=False)
        without = self._try([_user(), _assistant()], add_generation_prompt=False)
        if with_call is None or without is None or "qanswer" not in with_call.partition("qvalue")[0]:
            return None
        behind, rest = with_call.rpartition("qvalue")[2], without.rpartition("qanswer")[2]
        return behind.removesuffix(rest) if behind.endswith(rest) and behind != rest else None

    def _prints_tool(self, tool: MessageDict) -> bool:
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

    def _takes_system_inside(self, loop: list[MessageDict]) -> bool:
        """Return whether a system message is printed in place, after any kind of turn, and not as the assistant's.

        Some templates print a head of their own if no message at all is from the system: it has to stay as well.
        """
        before, later = [_user(), _assistant()], _user("qlater")
        in_place = (
            self._prints([*before, _system(), later], "quser", "qanswer", "qsystem", "qlater")
            and self._prints([_user(), _system()], "quser", "qsystem")
            and self._prints([_system("qrules"), _user(), _system()], "qrules", "quser", "qsystem")
            and (not loop or self._prints([*loop, _system()], "qresult", "qsystem"))
        )
        renders = (self._try([*before, *more, later]) for more in ([], [_system()], [_assistant("qsystem")]))
        without, inside, as_assistant = (text or "" for text in renders)
        return in_place and inside != as_assistant and inside.startswith(without.partition("qanswer")[0])

    def _image(self) -> Mapping[str, Any] | None:
        text = {"type": "text", "text": "quser"}
        for image in IMAGES:
            if self._shows_image([{"role": "user", "content": [text]}], image):
                return image
        return None

    def _takes_result_image(self, image: Mapping[str, Any]) -> bool:
        result = self._result() | {"content": [{"type": "text", "text": "qresult"}]}
        return self._shows_image([_user(), self._calling(), result], image)

    def _shows_image(self, messages: list[MessageDict], image: Mapping[str, Any]) -> bool:
        """Return whether ``image`` after the last message changes the prompt and is not printed as an object."""
        last = messages[-1]
        without = self._try(messages)
        text = self._try([*messages[:-1], last | {"content": [*last["content"], dict(image)]}])
        return text is not None and text != without and not any(mark in text for mark in ("'type'", '"type"'))

    def _is_adaptive(self, name: str, on: Any, off: Any) -> bool:
        if name not in self._variables or isinstance(on, bool):
            return False
        texts = {self._try([_user()], **given) for given in ({}, {name: on}, {name: off})}
        return None not in texts and len(texts) == 3

    def _takes_switch(self, name: str, values: tuple[Any, ...]) -> bool:
        """Return whether the template accepts every value, and prints different prompts for them."""
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
        """Return the accepted words; if any word is accepted, those that the template names and the usual three."""
        passing = [word for word in EFFORTS if self._try([_user()], **{name: word}) is not None]
        if self._try([_user()], **{name: "qeffort"}) is not None:
            passing = [word for word in passing if word in self._names or word in ("low", "medium", "high")]
        return tuple(passing)
