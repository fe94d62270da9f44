// Light, dark, or what the system says; and the colours of style.css for what is drawn on a canvas.
import { computed, effect, signal } from "@preact/signals";

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

const dark = matchMedia("(prefers-color-scheme: dark)");
const prefersDark = signal(dark.matches);
dark.addEventListener("change", () => (prefersDark.value = dark.matches));

/** "light" or "dark": what is shown. */
export const shown = computed(() => (theme.value === "system" ? (prefersDark.value ? "dark" : "light") : theme.value));

effect(() => {
  document.documentElement.dataset.theme = shown.value;
});

const NAMES = ["prepare", "queue", "prefill", "reasoning", "text", "call", "markup", "more", "tool", "cached", "evicted",
  "lost", "fresh", "accent", "line", "cut", "dim", "paper"];

export function colours(element) {
  void shown.value; // A canvas is drawn again when the colours change.
  const style = getComputedStyle(element);
  const found = Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  return { ...found, font: style.fontFamily };
}
