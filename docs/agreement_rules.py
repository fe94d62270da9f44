"""List the house rules that explain why public parser cases expect other parts than the parser returns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from singletree import families
from singletree.parsing.family import markers


@dataclass(frozen=True)
class Difference:
    """A row that the parser reads differently from what its authors expect."""

    source: str
    family: str
    row: Mapping[str, Any]
    ours: Mapping[str, Any]
    answers: tuple[Mapping[str, Any], ...]

    def shown(self) -> str:
        """Return the difference as lines for a person to read."""
        row = {
            k: self.row.get(k)
            for k in ("id", "test", "file", "mode", "reasoning_format", "generation_prompt", "is_partial")
        }
        return "\n".join(
            [
                f"--- {self.source[:6]} {self.family} {json.dumps(row)[:300]}",
                f"  text {str(self.row['text'])[:400]!r}",
                f"  ours {json.dumps(self.ours, ensure_ascii=False)[:400]}",
                *(f"  want {json.dumps(a, ensure_ascii=False)[:400]}" for a in self.answers),
            ]
        )


Explains = Callable[[Difference], bool]


def _row(difference: Difference, key: str) -> Any:
    return difference.row.get(key)


def _continued(difference: Difference) -> bool:
    return bool(_row(difference, "continue_final_message"))


def _left_in_text(difference: Difference) -> bool:
    return _row(difference, "reasoning_format") == 0 and "think" in str(difference.answers).lower()


def _fenced_json(difference: Difference) -> bool:
    return bool(_row(difference, "json_schema")) and "```" in difference.row["text"]


def _squeezed(text: Any) -> str:
    return "".join("".join(text or "").split())


def _calls(answer: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(c["name"], _value(c["arguments"])) for c in answer.get("tool_calls") or ()]


def _value(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _complete(difference: Difference) -> list[tuple[str, Any]]:
    return [(c[0], c[1]) for c in difference.ours["tool_calls"] if c[2]]


def _cut(difference: Difference) -> bool:
    return any(not c[2] for c in difference.ours["tool_calls"])


def _any(explains: Callable[[Difference, Mapping[str, Any]], bool]) -> Explains:
    return lambda difference: any(explains(difference, answer) for answer in difference.answers)


def _broke_out(difference: Difference, answer: Mapping[str, Any]) -> bool:
    return bool(answer.get("reasoning")) and len(difference.ours["tool_calls"]) > len(_calls(answer))


def _keeps_text(difference: Difference, answer: Mapping[str, Any]) -> bool:
    same_calls = "tool_calls" not in answer or _complete(difference) == _calls(answer)
    return same_calls and len(_squeezed(difference.ours["content"])) > len(_squeezed(answer.get("content")))


def _dispatches_cut(difference: Difference, answer: Mapping[str, Any]) -> bool:
    return _cut(difference) and len(_calls(answer)) >= len(_complete(difference))


def _hides_broken(difference: Difference, answer: Mapping[str, Any]) -> bool:
    ours = _complete(difference)
    return len(_calls(answer)) >= len(ours) and len(_squeezed(difference.ours["content"])) > len(
        _squeezed(answer.get("content"))
    )


def _forwarded(difference: Difference, answer: Mapping[str, Any]) -> bool:
    known = {(t.get("function") or t).get("name") for t in difference.row.get("tools") or ()}
    return any(name not in known for name, _ in _complete(difference)) and len(_complete(difference)) > len(
        _calls(answer)
    )


def _typed(difference: Difference, answer: Mapping[str, Any]) -> bool:
    ours, theirs = _complete(difference), _calls(answer)
    return ours != theirs and [n for n, _ in ours] == [n for n, _ in theirs]


def _recovered(difference: Difference, answer: Mapping[str, Any]) -> bool:
    return len(_complete(difference)) > len(_calls(answer))


def _bare(difference: Difference) -> bool:
    return difference.family in BARE


def _unmarked(family: str, text: Any) -> str:
    """Return ``text`` without the markers of a family."""
    found = sorted((m.strip().removeprefix("]").strip() for m in _markers(family)), key=len, reverse=True)
    plain = str(text or "")
    for marker in found:
        plain = plain.replace(marker, "") if marker.startswith(("<", "[", "◁", "]")) else plain
    return _squeezed(plain)


def _markers(family: str) -> list[str]:
    return [*markers(families.get(family.rpartition("+")[2])), "<think>", "</think>"]


def _reads_the_call(difference: Difference) -> bool:
    return not _row(difference, "family_tool") and any(m in difference.row["text"] for m in CALLS)


def _appends(difference: Difference) -> bool:
    return difference.family == "minimax_append_think"


def _always_thinks(difference: Difference, answer: Mapping[str, Any]) -> bool:
    return (
        bool(difference.ours["reasoning"])
        and not answer.get("reasoning")
        and "<think>" not in difference.row["text"]
    )


def _swapped(difference: Difference, answer: Mapping[str, Any]) -> bool:
    reasoning = _squeezed(difference.ours["reasoning"])
    return (
        bool(reasoning) and not difference.ours["content"] and reasoning == _squeezed(answer.get("content"))
    )


def _held_at_the_end(difference: Difference, answer: Mapping[str, Any]) -> bool:
    reasoning = _squeezed(difference.ours["reasoning"])
    return _row(difference, "mode") == "stream" and reasoning.startswith(_squeezed(answer.get("reasoning")))


def _header_words(difference: Difference, answer: Mapping[str, Any]) -> bool:
    ours, theirs = _squeezed(difference.ours["reasoning"]), _squeezed(answer.get("reasoning"))
    return (
        bool(theirs)
        and ours != theirs
        and _unmarked(difference.family, theirs).endswith(_unmarked(difference.family, ours))
    )


def _label(difference: Difference) -> bool:
    return re.search(r"<\|channel>thought[a-z]", difference.row["text"]) is not None


def _no_name(difference: Difference, answer: Mapping[str, Any]) -> bool:
    return any(name.isdigit() for name, _ in _complete(difference))


def _swallowed(difference: Difference, answer: Mapping[str, Any]) -> bool:
    ours, theirs = (_unmarked(difference.family, x.get("content")) for x in (difference.ours, answer))
    return ours == theirs and ("tool_calls" not in answer or _complete(difference) == _calls(answer))


CALLS = ("tool_call", "content_invoke")
BARE = ("llama3_json", "pythonic", "xlam")

RULES: list[tuple[str, Explains]] = [
    ("Gemma's label is a line of its own", _label),
    ("H1: text that the prompt already holds is not returned again", _continued),
    ("H1: without the prompt's tail, a family that always thinks begins thinking", _any(_always_thinks)),
    ("H12: reasoning that others leave in the text is reasoning", _appends),
    ("H2: reasoning is its own part; the row wants it left in the text", _left_in_text),
    ("H2: reasoning stays reasoning when nothing follows it", _any(_swapped)),
    ("JSON answers are passed on as written, with their code fence", _fenced_json),
    ("H3: a call inside open reasoning ends the reasoning", _any(_broke_out)),
    ("H3: the row checks reasoning only; the same pass parses the call in it", _reads_the_call),
    ("H6: Kimi's header names the tool; the name is not guessed from the arguments", _any(_no_name)),
    ("H7: a cut call is not dispatched", _any(_dispatches_cut)),
    ("H8: without a marker, only a known name at the start of a line is a call", _bare),
    ("H8: unknown names are forwarded", _any(_forwarded)),
    ("H9: stray markers are dropped", _any(_swallowed)),
    ("H9: the opening marker or phrase is not part of the reasoning", _any(_header_words)),
    ("H2: text before, between and after calls is kept", _any(_keeps_text)),
    ("H6: what is not a call comes back as text, with its markup", _any(_hides_broken)),
    ("H5: a call is complete when its arguments are", _any(_recovered)),
    (
        "H10, H11: a value keeps its text except for one line break; types come from the wire, else from the schema",
        _any(_typed),
    ),
    ("H6: a marker cut at the end is text", _any(_held_at_the_end)),
]
