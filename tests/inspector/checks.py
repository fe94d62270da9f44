"""What every view of the page has to hold: names for all controls, contrast, no overflow."""

from __future__ import annotations

from typing import Any

NAMED_ROLES = frozenset(
    (
        "button",
        "link",
        "textbox",
        "searchbox",
        "combobox",
        "checkbox",
        "image",
        "img",
        "treegrid",
        "table",
        "navigation",
    )
)

_LOW_CONTRAST = """() => {
  const channel = (byte) => {
    const part = byte / 255;
    return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  };
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const pen = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const parse = (text) => {
    pen.clearRect(0, 0, 1, 1); pen.fillStyle = text; pen.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
  const ground = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const low = new Map();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    const box = element.getBoundingClientRect();
    const left_out = "[aria-hidden], option, script, .is-off, .invisible";
    if (!node.data.trim() || box.width <= 1 || element.closest(left_out)) continue;
    const behind = ground(element);
    const ink = over(parse(getComputedStyle(element).color), behind);
    const [high, dark] = [light(ink), light(behind)].sort((a, b) => b - a);
    const contrast = (high + 0.05) / (dark + 0.05);
    const words = `${contrast.toFixed(2)} ${node.data.trim().slice(0, 20)}`;
    if (contrast < 4.5) low.set(`${element.className || element.tagName}`, words);
  }
  return [...low].map(([name, words]) => `${name}: ${words}`);
}"""

_OVERFLOWING = """() => {
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= width) return [];
  return [...document.querySelectorAll("body *")].filter((e) => e.getBoundingClientRect().right > width + 1)
    .map((e) => `${e.tagName}.${e.className}`);
}"""


def unnamed_controls(page: Any) -> list[str]:
    """Return the roles of controls and landmarks in the accessibility tree that have no name."""
    client = page.context.new_cdp_session(page)
    nodes = client.send("Accessibility.getFullAXTree")["nodes"]
    client.detach()
    shown = [node for node in nodes if not node.get("ignored")]
    return [
        role
        for node in shown
        if (role := node.get("role", {}).get("value")) in NAMED_ROLES
        and not node.get("name", {}).get("value")
    ]


def roles(page: Any) -> set[str]:
    """Return all roles in the accessibility tree."""
    client = page.context.new_cdp_session(page)
    nodes = client.send("Accessibility.getFullAXTree")["nodes"]
    client.detach()
    return {str(node.get("role", {}).get("value")) for node in nodes if not node.get("ignored")}


def low_contrast(page: Any) -> list[str]:
    """Return the kinds of visible text whose contrast is below 4.5 to 1 (WCAG 2.2, level AA)."""
    return list(page.evaluate(_LOW_CONTRAST))


def overflowing(page: Any) -> list[str]:
    """Return what makes the page wider than its window."""
    return list(page.evaluate(_OVERFLOWING))
