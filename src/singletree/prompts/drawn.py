"""Texts that no template may trim, split or look into: they are put in when it is rendered."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

SENTINEL = "\udffe"
"""Brackets the number of a text that is put in after rendering, where no template trims or splits it."""

_SENTINELS = re.compile(f"{SENTINEL}([0-9]+){SENTINEL}")


@dataclass(slots=True)
class Drawn:
    """Texts that take the place of their sentinels after rendering."""

    texts: list[str] = field(default_factory=list)
    leads: list[str] = field(default_factory=list)

    def sentinel(self, text: str, lead: str = "") -> str:
        """What stands for ``text`` until then, and for the ``lead`` before it, where the template prints one."""
        self.texts.append(text)
        self.leads.append(lead)
        return f"{SENTINEL}{len(self.texts) - 1}{SENTINEL}"

    def copy(self) -> Drawn:
        """One that goes on from here."""
        return Drawn([*self.texts], [*self.leads])

    def put_in(self, rendered: str) -> str:
        """``rendered`` with the texts in place of their sentinels."""
        if not self.texts:
            return rendered
        pieces: list[str] = []
        at = 0
        for match in _SENTINELS.finditer(rendered):
            number = int(match[1])
            pieces += [rendered[at : match.start()].removesuffix(self.leads[number]), self.texts[number]]
            at = match.end()
        return "".join([*pieces, rendered[at:]]) if pieces else rendered

    def end_of_last(self, rendered: str) -> int:
        """Where the last text's sentinel ends in ``rendered``; 0 when the template did not print it."""
        sentinel = f"{SENTINEL}{len(self.texts) - 1}{SENTINEL}"
        return rendered.rfind(sentinel) + len(sentinel) if sentinel in rendered else 0
