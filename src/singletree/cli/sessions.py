"""``singletree sessions``: what sessions cost, how to fork, move and compare them, and those that are saved."""

from __future__ import annotations

from cyclopts import App

app = App(name="sessions", help="Show what sessions cost; fork, move, compare and save them.")

_COMMANDS = {
    "cost": ("singletree.cli.session_cost:cost", "Show what sessions cost, and by whose fault."),
    "fork": ("singletree.cli.session_forks:fork_to_model", "Let another model go on with a session."),
    "compare": ("singletree.cli.session_forks:compare_sessions", "Show two sessions side by side."),
    "drain": ("singletree.cli.session_forks:drain_model", "Let another model answer all requests for one."),
    "list": ("singletree.cli.saved_sessions:list_saved", "List the saved states of a folder."),
    "export": ("singletree.cli.saved_sessions:export_saved", "Copy a saved state, for another machine."),
    "import": ("singletree.cli.saved_sessions:import_saved", "Take a saved state from another machine."),
    "delete": ("singletree.cli.saved_sessions:delete_saved", "Delete saved states."),
}

for _name, (_target, _help) in _COMMANDS.items():
    app.command(_target, name=_name, help=_help)
