// Numbers, durations and times as the page shows them. An unknown value is an en dash.
export const UNKNOWN = "–";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });

export const count = (value) => (value == null ? UNKNOWN : whole.format(value));

/** A count in at most five characters: 950, 8,200, 41.2k, 412k, 1.3M. */
export function short(value) {
  if (value == null) return UNKNOWN;
  if (value < 10_000) return whole.format(value);
  if (value < 100_000) return `${(value / 1000).toFixed(1)}k`;
  if (value < 1_000_000) return `${Math.round(value / 1000)}k`;
  return `${(value / 1_000_000).toFixed(value < 10_000_000 ? 1 : 0)}M`;
}

/** A duration in milliseconds: 0.8 ms, 228 ms, 4.4 s, 2 min 05 s, 3 h 12 min. */
export function duration(ms) {
  if (ms == null) return UNKNOWN;
  if (ms < 0.05) return "0 ms";
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 999.5) return `${Math.round(ms)} ms`;
  if (ms < 9_950) return `${(ms / 1000).toFixed(1)} s`;
  const seconds = Math.round(ms / 1000);
  if (seconds < 60) return `${seconds} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${String(seconds % 60).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

/** A share; it is never rounded up to 100 %. */
export function percent(part) {
  if (part == null || Number.isNaN(part)) return UNKNOWN;
  if (part >= 1) return "100 %";
  const value = Math.floor(part * 1000) / 10;
  return `${value >= 99 || value === 0 ? value : Math.floor(value)} %`;
}

export function bytes(value) {
  if (value == null) return UNKNOWN;
  if (value < 1000) return `${value} B`;
  return value < 1_000_000 ? `${(value / 1000).toFixed(1)} kB` : `${(value / 1_000_000).toFixed(1)} MB`;
}

export const timeOfDay = (seconds) => (seconds == null ? UNKNOWN : clock.format(new Date(seconds * 1000)));
export const dayAndTime = (seconds) => (seconds == null ? UNKNOWN : day.format(new Date(seconds * 1000)));

export function age(seconds, now) {
  const past = Math.max(0, now - seconds);
  if (past < 5) return "now";
  if (past < 90) return `${Math.round(past)} s ago`;
  if (past < 5400) return `${Math.round(past / 60)} min ago`;
  return past < 129_600 ? `${Math.round(past / 3600)} h ago` : dayAndTime(seconds);
}

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

/** A session's own name, short enough for a line: the last parts of long keys distinguish them. */
export function sessionName(session) {
  const key = session.key ?? session.id;
  if (key.length <= 28) return key;
  const last = key.slice(key.lastIndexOf("/") + 1);
  return last.length < key.length ? `${key.slice(0, 8)}…/${last.slice(-16)}` : `${key.slice(0, 12)}…${key.slice(-14)}`;
}

/** What distinguishes a sub-session from its parent. */
export const partName = (session) => (session.key ?? session.id).split("/").at(-1).slice(-12);

export const harnessName = (session) => session.harness ?? session.client?.split(/[\s(]/)[0] ?? "unknown client";
