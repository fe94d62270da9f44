// Light, dark, or what the system says; and the colours of style.css for what is drawn on a canvas.
import { effect, signal } from "@preact/signals";

const STORED = "singletree-theme";
const THEMES = ["system", "light", "dark"];

export const theme = signal(stored());

function stored() {
  try {
    const value = localStorage.getItem(STORED);
    return THEMES.includes(value) ? value : "system";
  } catch {
    return "system"; // A file from disk may have no storage.
  }
}

export function nextTheme() {
  theme.value = THEMES[(THEMES.indexOf(theme.value) + 1) % THEMES.length];
  try {
    localStorage.setItem(STORED, theme.value);
  } catch {
    // It holds until the page is closed.
  }
}

effect(() => {
  if (theme.value === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme.value;
});

/** Counts up when the colours change, so that canvases are drawn again. */
export const repaint = signal(0);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (repaint.value += 1));

const NAMES = ["prepare", "queue", "prefill", "reasoning", "text", "call", "markup", "more", "tool", "cached", "evicted",
  "lost", "fresh", "accent", "line", "cut", "dim", "paper"];

export function colours(element) {
  void theme.value;
  void repaint.value;
  const style = getComputedStyle(element);
  const found = Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  return { ...found, font: style.fontFamily };
}
