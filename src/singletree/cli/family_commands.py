"""``singletree families``: the table of model families, and drafts of those that are not in it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from singletree.cli.looking import list_families, read_text
from singletree.errors import BadConfiguration

if TYPE_CHECKING:
    from singletree.server.template_turns import Trial

app = App(name="families", help="List the model families, or draft a new one.")
app.default(list_families)


@app.command
def draft(
    template: Path, *, name: str = "", samples: Annotated[bool, Parameter(negative="")] = False
) -> None:
    """Propose a declaration for the family that a chat template belongs to.

    The template writes turns with known parts; the declaration is what stands between the parts, and is tried on the
    same turns. Exits with 1 when it does not read all of them back: what differs is printed with it.

    Parameters
    ----------
    template
        Jinja file.
    name
        What to call the family; the file's name by default.
    samples
        Print sample turns as TOML as well, for tests/families/samples.
    """
    import sys

    from singletree.errors import BadFamily
    from singletree.parsing.declaration import sample_of, source_of
    from singletree.prompts.template import ChatTemplate
    from singletree.server.template_turns import drafted, tried

    read = ChatTemplate(read_text(str(template)), bos_token="<s>", eos_token="</s>")
    called = name or re.sub(r"\W+", "_", template.name.partition(".jinja")[0]).strip("_").lower()
    try:
        family = drafted(read, called)
    except BadFamily as error:
        raise BadConfiguration(f"{template}: no family can be drafted: {error.message}") from None
    trials = tried(family, read)
    print(source_of(family))
    for line in _told(trials, reads_calls=read.reads.calls, has_calls=bool(family.forms)):
        print(f"# {line}")
    if samples:
        for trial in trials:
            print()
            written = trial.written
            print(sample_of(written.case, written.text, written.tail, written.parts))
    if not all(trial.agrees for trial in trials) or (read.reads.calls and not family.forms):
        sys.exit(1)


def _told(trials: list[Trial], *, reads_calls: bool, has_calls: bool) -> list[str]:
    """How far the draft can be believed."""
    good = [trial.written.case for trial in trials if trial.agrees]
    lines = [
        f"Reads back {len(good)} of {len(trials)} turns that the template wrote: {', '.join(good) or 'none'}."
    ]
    if not reads_calls:
        lines.append("The template prints no calls, so none could be drafted.")
    elif not has_calls:
        lines.append("The template prints calls, but not in a way that a picture can draw.")
    for trial in trials:
        if not trial.agrees:
            lines += [
                f"{trial.written.case}: the template wrote {trial.written.text!r},",
                f"  which was to say {_short(trial.written.parts)}",
                f"  and is read as       {_short(trial.read)}.",
            ]
    return lines


def _short(parts: tuple[object, ...]) -> str:
    return ", ".join(map(repr, parts)) or "nothing"
