"""Make the picture of areas and rooms in architecture.md from the imports of the source."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.append(str(DOCS.parent / "tests"))

from source import DOORS, area, imports, modules, room  # noqa: E402

Edges = Mapping[str, set[str]]


def picture() -> str:
    """Return a Mermaid flowchart: areas with rooms are boxes around their rooms, arrows point to what is imported.

    An arrow that follows from two others is left out. Rooms of one area with the same arrows share a node. The modules
    at the top of the package (``conversation``, ``events`` …), which everything imports, have no node.
    """
    between, inside = _edges()
    lines = ["flowchart TD"]
    for name in sorted(between):
        if name not in inside:
            lines.append(f"  {name}")
            continue
        lines.append(f"  subgraph {name}")
        nodes = _merged(inside[name])
        lines += [f'    {name}_{rooms[0]}["{"<br>".join(rooms)}"]' for rooms in nodes]
        lines += _arrows(nodes, inside[name], f"    {name}_")
        lines.append("  end")
    lines += _arrows([(name,) for name in sorted(between)], between, "  ")
    return "\n".join(lines) + "\n"


def _edges() -> tuple[Edges, dict[str, Edges]]:
    """Return the imports between areas, and for each area with rooms the imports between its rooms."""
    folders = {m.area for m in modules() if m.path.name == "__init__.py"} | DOORS
    nested = {m.area for m in modules() if m.path.name == "__init__.py" and room(m.name)}
    between: dict[str, set[str]] = {name: set() for name in folders if name}
    inside: dict[str, dict[str, set[str]]] = {name: {} for name in nested}
    for module in modules():
        own = room(module.name)
        if module.area in inside and own:
            inside[module.area].setdefault(own, set())
        for _, target in imports(module):
            if not target.startswith("singletree."):
                continue
            there, other = area(target), room(target)
            if module.area != there and {module.area, there} <= between.keys():
                between[module.area].add(there)
            elif module.area == there and module.area in inside and own and other and own != other:
                inside[there].setdefault(own, set()).add(other)
    return between, dict(inside)


def _merged(edges: Edges) -> list[tuple[str, ...]]:
    """Return the rooms, those that import the same rooms and are imported by the same ones together."""
    alike: dict[tuple[frozenset[str], frozenset[str]], list[str]] = {}
    for name in sorted(edges):
        importers = frozenset(other for other, targets in edges.items() if name in targets)
        alike.setdefault((frozenset(edges[name]), importers), []).append(name)
    return [tuple(names) for names in alike.values()]


def _arrows(nodes: list[tuple[str, ...]], edges: Edges, prefix: str) -> list[str]:
    """Return an arrow for each import between nodes that no longer way between them implies."""
    indent, _, area_name = prefix.rpartition(" ")
    first = {name: names[0] for names in nodes for name in names}
    return [
        f"{indent} {area_name}{names[0]} --> {area_name}{target}"
        for names in nodes
        for target in sorted({first[name] for name in edges[names[0]]})
        if not any(
            target in _reached(edges, other, first) for other in edges[names[0]] if first[other] != target
        )
    ]


def _reached(edges: Edges, start: str, first: Mapping[str, str]) -> set[str]:
    """Return the nodes that ``start`` imports, directly or through others."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for name in edges[waiting.pop()]:
            if first[name] not in found:
                found.add(first[name])
                waiting.append(name)
    return found
