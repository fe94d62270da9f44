"""``singletree sessions``: what a running server knows of sessions. Each command is imported when it is called."""

from __future__ import annotations

from cyclopts import App

app = App(name="sessions", help="Show what sessions cost.")

_COMMANDS = {
    "cost": ("singletree.cli.session_cost:cost", "Show what sessions cost, and by whose fault."),
}

for _name, (_target, _help) in _COMMANDS.items():
    app.command(_target, name=_name, help=_help)
