// Order the sessions: filtered, sorted, sub-agents under their parents.

const RUNNING = 1e12; // later than any time

export const SORTS = {
  // Running sessions keep their order: the last event of each changes many times a second.
  last: (session) => (session.running ? RUNNING + session.first_at : session.last_at),
  turns: (session) => session.turns,
  prompt: (session) => session.prompt_tokens,
  cached: (session) => session.cached_tokens ?? -1,
  generated: (session) => session.generated_tokens,
  first: (session) => session.first_token_ms ?? -1,
  place: (session) => session.share_in_place ?? 2,
  breaks: (session) => session.lost_tokens * 1e-9 + session.breaks,
};

const WORDS_OF = ["id", "key", "harness", "client", "model"];

export function matches(session, filters) {
  if (filters.model && !(session.models ?? [session.model]).includes(filters.model)) return false;
  if (filters.harness && session.harness !== filters.harness) return false;
  if (filters.live && !session.is_live) return false;
  if (filters.broken && !session.breaks) return false;
  if (filters.errors && !session.errors) return false;
  const text = WORDS_OF.map((name) => session[name] ?? "").join(" ").toLowerCase();
  return filters.q
    .toLowerCase()
    .split(/\s+/)
    .every((word) => text.includes(word));
}

/**
 * Rows in the order in which they are shown.
 * @returns {{session: object, level: number, children: number, folded: boolean, orphan: boolean}[]}
 */
export function rowsOf(sessions, filters, sort, folded) {
  const shown = new Map();
  for (const session of sessions) if (matches(session, filters)) shown.set(session.id, session);
  const value = SORTS[sort.by];
  const order = (a, b) => (sort.up ? 1 : -1) * (value(a) - value(b)) || (a.id < b.id ? -1 : 1);
  const children = new Map();
  const roots = [];
  for (const session of shown.values()) {
    const under = shown.has(session.parent) && session.parent !== session.id;
    if (!under) roots.push(session);
    else if (children.has(session.parent)) children.get(session.parent).push(session);
    else children.set(session.parent, [session]);
  }
  const rows = [];
  const placed = new Set();
  const place = (session, level) => {
    if (placed.has(session.id)) return; // Clients name their parents: two sessions may name each other.
    placed.add(session.id);
    const below = children.get(session.id) ?? [];
    const isFolded = folded.has(session.id) && below.length > 0;
    const orphan = level === 1 && session.parent != null;
    rows.push({ session, level, children: below.length, folded: isFolded, orphan });
    if (isFolded) below.forEach((child) => hide(child));
    else [...below].sort(order).forEach((child) => place(child, level + 1));
  };
  const hide = (session) => {
    if (placed.has(session.id)) return;
    placed.add(session.id);
    (children.get(session.id) ?? []).forEach(hide);
  };
  roots.sort(order).forEach((root) => place(root, 1));
  for (const session of shown.values()) place(session, 1); // what only a circle of parents holds
  return rows;
}
