"""``singletree doctor``: check a model before it is served, or show what this machine has and which models fit.

The figures of models are those of the checkpoints: sizes of the files on the Hugging Face Hub, and the attention of
``config.json``.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from singletree.cli.flag_values import AsJson
from singletree.cli.inspect import ModelFlags, print_value, read_text
from singletree.engines.devices import (
    ENGINE_PACKAGES,
    KV_SHARE,
    Gpu,
    find_gpus,
    installed_version,
    processor_name,
    usable_cores,
    usable_memory,
)
from singletree.errors import BadConfiguration
from singletree.testing import byte_model

if TYPE_CHECKING:
    from singletree.drafting.diagnosis import Finding
    from singletree.server.models.chat_format import ChatFormat
    from singletree.server.settings.config import Config

_TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2")


def doctor(
    model: str | None = None,
    *,
    flags: ModelFlags = ModelFlags(),  # noqa: B008 (frozen)
    machine: Annotated[bool, Parameter(negative="")] = False,
    stability_off: Annotated[
        tuple[str, ...], Parameter(name="--stability-off", consume_multiple=True, negative="")
    ] = (),
    json: AsJson = False,
) -> None:
    """Check a model: what was detected, and what will not work. Loads no weights. Or show what this machine can run.

    Exits with 1 when something that harnesses need does not work.

    Parameters
    ----------
    model
        Name, GGUF file, folder or Hugging Face id, as for `serve`; or a chat template (.jinja).
    machine
        Show memory, devices and installed engines, and which models fit.
    stability_off
        Names of prompt stability rules to switch off.
    """
    from singletree.drafting.diagnosis import diagnose

    if machine:
        report = machine_report()
        print_value(report) if json else _print_machine(report)
        return
    if model is None:
        raise BadConfiguration("doctor: name a model or a chat template, or give --machine")
    only_template = model.endswith(_TEMPLATE_SUFFIXES)
    if only_template:
        flags = dataclasses.replace(flags, chat_template=Path(model))
    config = flags.config(byte_model.NAME if only_template else model, stability_off=stability_off)
    name, chat_format = (model, _format_of_template(config)) if only_template else _format_of_model(config)
    findings = diagnose(chat_format, tokenizer=not only_template)
    wrong = any(finding.level == "wrong" for finding in findings)
    if json:
        listed = [dataclasses.asdict(finding) for finding in findings]
        print_value({"model": name, "works": not wrong, "findings": listed})
    else:
        _print(name, findings)
    if wrong:
        sys.exit(1)


def _format_of_model(config: Config) -> tuple[str, ChatFormat]:
    from singletree.cli.progress_bar import TerminalProgress
    from singletree.server.models import model_source
    from singletree.server.models.chat_format import load_chat_format

    with TerminalProgress() as progress:
        name, tokenizer = model_source.find_tokenizer(config, progress)
    return name, load_chat_format(config, tokenizer)


def _format_of_template(config: Config) -> ChatFormat:
    """Return the chat format of a template alone, with a tokenizer of bytes in place of the model's."""
    from singletree.server.models.chat_format import ChatFormat, choose_family, disabled_rules, template_alone

    template = template_alone(read_text(str(config.chat_template)))
    family, why = choose_family(config, template)
    return ChatFormat(
        tokenizer=byte_model.byte_tokenizer(),
        template=template,
        family=family,
        why=why,
        stability_off=disabled_rules(config),
    )


_MARKS = {"good": "", "note": "[yellow]note[/]", "wrong": "[red bold]wrong[/]"}


def _print(name: str, findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"[bold]{escape(name)}[/]\n")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(no_wrap=True)
    for finding in findings:
        table.add_row(finding.topic, escape(finding.found), _MARKS[finding.level])
    console.print(table)
    problems = sorted((f for f in findings if f.matter), key=lambda finding: finding.level != "wrong")
    if not problems:
        console.print("\nNo problems found.")
    for finding in problems:
        console.print(f"\n{_MARKS[finding.level]}  {finding.topic}: {escape(finding.matter)}")
        console.print(f"      → {escape(finding.cure)}")


_PLACES = {"memory": "llama.cpp", "gpu": "vLLM, SGLang"}
_GIB = 2**30


def machine_report() -> dict[str, Any]:
    """Return what ``singletree doctor --machine`` prints, as JSON values; memory is in bytes."""
    gpus, memory = find_gpus(), usable_memory()
    return {
        "processor": processor_name(),
        "cores": usable_cores(),
        "memory": memory,
        "gpus": [dataclasses.asdict(gpu) for gpu in gpus],
        "engines": {title: installed_version(names) for title, _, names in ENGINE_PACKAGES.values()},
        "saves_sessions": [title for title, _, _ in ENGINE_PACKAGES.values() if gpus or title == "llama.cpp"],
        "models": [dataclasses.asdict(fit) for fit in find_fits(memory, gpus)],
    }


def _print_machine(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    machine = Table(box=None, pad_edge=False, show_header=False)
    machine.add_row("processor", escape(f"{report['processor']}, {report['cores']} cores to use"))
    machine.add_row("memory", f"{report['memory'] / _GIB:.1f} GiB")
    for gpu in report["gpus"]:
        free = "" if gpu["free"] is None else f", {gpu['free'] / _GIB:.1f} free"
        machine.add_row("GPU", escape(f"{gpu['name']}, {gpu['memory'] / _GIB:.1f} GiB{free}"))
    if not report["gpus"]:
        machine.add_row("GPU", "none")
    for extra, (title, version) in zip(ENGINE_PACKAGES, report["engines"].items(), strict=True):
        note = "saves sessions" if title in report["saves_sessions"] else "needs a GPU"
        installed = version and f"{version}; --prefix-cache-path {note}"
        machine.add_row(title, escape(installed or f"not installed: pip install 'singletree[{extra}]'"))
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


GIGABYTE = 10**9
_ELEMENT_BYTES = 2  # of keys and values, in 16 bits

AGENT_WINDOW = 32_768
"""Tokens of a session of an agent, by which streams are counted: a harness's preamble and some turns."""

_LEAST_WINDOW = 8_192
_MEMORY_SHARE = 0.85  # of the main memory, for llama.cpp
_GPU_SHARE = 0.92  # vLLM's default --gpu-memory-utilization
_GPU_OVERHEAD = 2 * 2**30  # activations and CUDA graphs, of each GPU


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a model needs.

    Attributes:
        name: what ``--model`` takes.
        gguf_bytes: size of its GGUF file, about 4 bits a weight; None if there is none.
        weights_bytes: size of its weights in Hugging Face's layout.
        layers: how many of its layers attend to the whole prompt.
        kv_heads: heads of keys and values in each.
        head_size: length of a key.
        window: the window that it was trained for, in tokens.
    """

    name: str
    gguf_bytes: int | None
    weights_bytes: int
    layers: int
    kv_heads: int
    head_size: int
    window: int

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_size * _ELEMENT_BYTES


def _size(
    name: str, gguf: float | None, weights: float, attention: tuple[int, int, int], window: int
) -> ModelSize:
    """Return a row; ``gguf`` and ``weights`` are in GB."""
    file = None if gguf is None else int(gguf * GIGABYTE)
    return ModelSize(name, file, int(weights * GIGABYTE), *attention, window)


MODEL_SIZES = (
    _size("SmolLM2-135M-Instruct", 0.098, 0.27, (30, 3, 64), 8_192),
    _size("Qwen2.5-Coder-1.5B-Instruct", 1.12, 3.1, (28, 2, 128), 32_768),
    _size("Qwen/Qwen3-4B", 2.5, 8.0, (36, 8, 128), 40_960),
    _size("meta-llama/Llama-3.1-8B-Instruct", 4.9, 16.1, (32, 8, 128), 131_072),
    _size("Qwen/Qwen3-8B", 5.0, 16.4, (36, 8, 128), 40_960),
    _size("Qwen/Qwen3-14B", 9.0, 29.5, (40, 8, 128), 40_960),
    _size("openai/gpt-oss-20b", 12.1, 13.8, (12, 8, 64), 131_072),
    _size("mistralai/Devstral-Small-2507", 14.3, 47.2, (40, 8, 128), 131_072),
    _size("Qwen/Qwen3-Coder-30B-A3B-Instruct", 18.6, 61.1, (48, 4, 128), 262_144),
    _size("Qwen/Qwen3-32B", 19.8, 65.5, (64, 8, 128), 40_960),
    _size("openai/gpt-oss-120b", 63.4, 65.3, (18, 8, 64), 131_072),
    _size("zai-org/GLM-4.5-Air", 73.0, 221.0, (46, 8, 128), 131_072),
)
"""Models of different sizes that call tools or that tests use; what they need, smallest file first."""


@dataclass(frozen=True, slots=True)
class ModelFit:
    """How a model fits a machine.

    Attributes:
        model: its name.
        where: ``memory`` for llama.cpp, ``gpu`` for vLLM and SGLang.
        weights_bytes: what its weights take.
        window: longest prompt and completion together that fits, in tokens; 0 when the model does not fit.
        streams: how many sessions of ``AGENT_WINDOW`` tokens fit at once, or of the window if that is shorter.
    """

    model: str
    where: Literal["memory", "gpu"]
    weights_bytes: int
    window: int
    streams: int


def find_fits(memory: int, gpus: Sequence[Gpu], sizes: Sequence[ModelSize] = MODEL_SIZES) -> list[ModelFit]:
    """Return how each of ``sizes`` fits ``memory`` bytes of main memory, or the GPUs if there are some."""
    found: list[ModelFit] = []
    on_gpus = int(sum(gpu.memory * _GPU_SHARE - _GPU_OVERHEAD for gpu in gpus))
    for size in sizes:
        if gpus:
            found.append(_fit(size, "gpu", size.weights_bytes, on_gpus - size.weights_bytes))
        if size.gguf_bytes is not None:
            # A larger cache is used where --context-window asks for one.
            room = min(int(memory * _MEMORY_SHARE) - size.gguf_bytes, memory // KV_SHARE)
            found.append(_fit(size, "memory", size.gguf_bytes, room))
    return found


def _fit(size: ModelSize, where: Literal["memory", "gpu"], weights: int, room: int) -> ModelFit:
    tokens = max(0, room) // size.token_bytes
    window = min(tokens, size.window)
    if window < min(size.window, _LEAST_WINDOW):
        return ModelFit(size.name, where, weights, 0, 0)
    return ModelFit(size.name, where, weights, window, tokens // min(window, AGENT_WINDOW))
