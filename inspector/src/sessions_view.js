// All sessions, live and recent, as a tree.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { address, go, sessionAddress, setQuery } from "./address.js";
import { mark } from "./compare.js";
import { age, count, dayAndTime, duration, harnessName, percent, plural, sessionName, short } from "./format.js";
import { html } from "./html.js";
import { useKeys } from "./keyboard.js";
import { follow, serverNow, useLive } from "./live.js";
import { Empty, Problem, Share, awaited } from "./pieces.js";
import { rowsOf } from "./session_tree.js";
import { generation, useAnswer } from "./source.js";
import { useMedia, useTick } from "./watched.js";
import { VirtualRows } from "./virtual_rows.js";
import { PROTOCOLS } from "./words.js";

const MOST = 1000;
const LIVE_SECONDS = 60;
const LIVE_CHECK_MS = 5000;
const SWITCHES = [
  ["live", "live"],
  ["broken", "with breaks"],
  ["errors", "with errors"],
];

const COLUMNS = [
  { name: "session", label: "Session", cell: null },
  { name: "model", label: "Model", cell: ({ model }) => html`<span class="clip" title=${model}>${model}</span>` },
  { name: "turns", sort: "turns", label: "Turns", cell: ({ turns, retries }) => html`<span title=${plural(retries, "retry", "retries")}>
      ${count(turns)}${retries > 0 && html`<span class="dim"> +${retries}</span>`}</span>` },
  { name: "in", sort: "prompt", label: "Tokens in", cell: ({ prompt_tokens: tokens }) => short(tokens), title: "prompt tokens, summed over the turns" },
  { name: "cached", sort: "cached", label: "Cached", cell: ({ cached_tokens: tokens }) => short(tokens), title: "of them, what the engine had in its prefix cache" },
  { name: "out", sort: "generated", label: "Out", cell: ({ generated_tokens: tokens }) => short(tokens), title: "generated tokens" },
  { name: "first", sort: "first", label: "First token", cell: ({ first_token_ms: ms }) => duration(ms), title: "median time to the first token" },
  { name: "place", sort: "place", label: "In place", cell: ({ share_in_place: part }) => html`<${Share} part=${part} />`, title: "share of the prompt tokens that continue the last prompt and turn" },
  { name: "breaks", sort: "breaks", label: "Breaks", cell: Breaks, title: "prompts that broke, and the tokens that had to be read again" },
  { name: "last", sort: "last", label: "Last", cell: (session, now) => html`<span title=${dayAndTime(session.last_at)}>
      ${session.running ? html`<span class="live-word">running</span>` : age(session.last_at, now)}</span>` },
];

function Breaks(session) {
  if (session.errors) {
    return html`<span class="bad">${plural(session.errors, "error")}</span>${session.breaks > 0 && html` <span class="bad">✕ ${session.breaks}</span>`}`;
  }
  if (!session.breaks) return html`<span class="dim">none</span>`;
  return html`<span class="bad" title=${`${count(session.lost_tokens)} tokens read again, about ${duration(session.lost_ms)}`}>
    ✕ ${count(session.breaks)}</span> <span class="dim">${short(session.lost_tokens)}</span>`;
}

function useSessions(query) {
  const asked = new URLSearchParams({ limit: String(MOST) });
  for (const name of ["q", "model", "harness"]) if (query[name]) asked.set(name, query[name]);
  const answer = useAnswer(`/inspect/api/sessions?${asked}`);
  const [changes, setChanges] = useState({ sessions: new Map(), gone: new Set() });
  const epoch = generation.value;
  // What the stream said is newer than any answer, until the stream was opened again.
  useEffect(() => setChanges({ sessions: new Map(), gone: new Set() }), [epoch]);
  useEffect(() => follow(null), []);
  useTick(LIVE_CHECK_MS);
  const clock = Math.floor(Date.now() / LIVE_CHECK_MS);
  useLive((batch) =>
    setChanges((old) => {
      const gone = new Set(old.gone);
      batch.gone.forEach((id) => gone.add(id));
      batch.sessions.forEach((_, id) => gone.delete(id));
      return { sessions: new Map([...old.sessions, ...batch.sessions]), gone };
    }),
  );
  const sessions = useMemo(() => {
    const all = new Map((answer.data?.sessions ?? []).map((session) => [session.id, session]));
    for (const [id, session] of changes.sessions) all.set(id, session);
    for (const id of changes.gone) all.delete(id);
    // The server sends nothing when a session has been quiet for a minute.
    const now = serverNow();
    return [...all.values()].map((session) =>
      session.is_live && !session.running && now - session.last_at > LIVE_SECONDS ? { ...session, is_live: false } : session,
    );
  }, [answer.data, changes, clock]);
  return { answer, sessions };
}

export function SessionsView() {
  const query = Object.fromEntries(address.value.query);
  const filters = { q: "", ...query };
  const { answer, sessions } = useSessions(filters);
  const [folded, setFolded] = useState(new Set());
  const [chosenId, setChosen] = useState(null);
  const search = useRef(null);
  const [by, direction] = (filters.sort ?? "last").split("-");
  const rows = useMemo(
    () => rowsOf(sessions, filters, { by, up: direction === "up" }, folded),
    [sessions, address.value, folded],
  );
  const chosen = rows.findIndex((row) => row.session.id === chosenId);
  const choose = (index) => rows.length && setChosen(rows[Math.max(0, Math.min(rows.length - 1, index))].session.id);
  const fold = (close) => {
    const row = rows[chosen];
    if (!row?.children) return false;
    const next = new Set(folded);
    if (close) next.add(row.session.id);
    else next.delete(row.session.id);
    return setFolded(next);
  };
  const open = () => (rows[chosen] ? go(sessionAddress(rows[chosen].session.id)) : false);
  useKeys({
    "/": () => search.current?.focus(),
    j: () => choose(chosen + 1),
    ArrowDown: () => choose(chosen + 1),
    k: () => choose(chosen - 1),
    ArrowUp: () => choose(chosen < 0 ? 0 : chosen - 1),
    Home: () => choose(0),
    End: () => choose(rows.length - 1),
    ArrowLeft: () => fold(true),
    ArrowRight: () => fold(false),
    Enter: open,
    x: () => (rows[chosen] ? mark(rows[chosen].session.id, sessionName(rows[chosen].session)) : false),
  });
  return html`<div class="page sessions-page">
    <h1 class="visually-hidden">Sessions</h1>
    <${Filters} filters=${filters} answer=${answer.data} search=${search} />
    ${answer.data && html`<${Totals} sessions=${sessions} rows=${rows} answer=${answer.data} />`}
    ${!answer.data
      ? awaited(answer)
      : rows.length
        ? html`<${Table} rows=${rows} chosen=${chosen} choose=${choose} sort=${{ by, direction }} setFold=${(id) => {
            const next = new Set(folded);
            if (!next.delete(id)) next.add(id);
            setFolded(next);
          }} />`
        : html`<${NoRows} all=${sessions.length} filters=${filters} />`}
    ${answer.error && answer.data && html`<${Problem} error=${answer.error} />`}
  </div>`;
}

const NoRows = ({ all, filters }) =>
  all || Object.values(filters).some(Boolean)
    ? html`<${Empty} title="No session matches the filters.">
        <button type="button" onClick=${() => go("/sessions")}>Show all sessions</button>
      <//>`
    : html`<${Empty} title="No session yet.">
        Point a harness at this server, for instance with <code>singletree launch claude</code>. Its turns appear here while
        they run.
      <//>`;

function Filters({ filters, answer, search }) {
  const [typed, setTyped] = useState(filters.q);
  useEffect(() => setTyped(filters.q), [filters.q]);
  useEffect(() => {
    const timer = setTimeout(() => typed !== filters.q && setQuery({ q: typed }), 150);
    return () => clearTimeout(timer);
  }, [typed]);
  const select = (name, label, options) => html`<label>
    <span class="visually-hidden">${label}</span>
    <select value=${filters[name] ?? ""} onChange=${(event) => setQuery({ [name]: event.target.value })}>
      <option value="">${label}: all</option>
      ${options.map((option) => html`<option key=${option} value=${option}>${option}</option>`)}
    </select>
  </label>`;
  return html`<search class="filters">
    <label class="search">
      <span class="visually-hidden">Search sessions by name, harness or model</span>
      <input
        ref=${search}
        type="search"
        placeholder="Search name, harness, model"
        value=${typed}
        onInput=${(event) => setTyped(event.target.value)}
      />
      <kbd aria-hidden="true">/</kbd>
    </label>
    ${select("harness", "Harness", answer?.harnesses ?? [])} ${select("model", "Model", answer?.models ?? [])}
    ${SWITCHES.map(
      ([name, label]) => html`<label key=${name} class="switch">
        <input
          type="checkbox"
          checked=${Boolean(filters[name])}
          onChange=${(event) => setQuery({ [name]: event.target.checked ? "1" : "" })}
        />
        ${label}
      </label>`,
    )}
  </search>`;
}

function Totals({ sessions, rows, answer }) {
  const shown = rows.map((row) => row.session);
  const sum = (name) => shown.reduce((all, session) => all + (session[name] ?? 0), 0);
  const prompt = sum("prompt_tokens");
  const live = shown.filter((session) => session.is_live).length;
  return html`<p class="totals" role="status">
    <strong>${plural(shown.length, "session")}</strong>${live > 0 && html`, <span class="live-word">${count(live)} live</span>`}
    ${prompt > 0 &&
    html` · ${short(prompt)} tokens in, ${percent(sum("matched_tokens") / prompt)} of them in place · ${plural(sum("breaks"), "break")}${sum("breaks") > 0 &&
    html`, ${short(sum("lost_tokens"))} tokens and about ${duration(sum("lost_ms"))} lost`}`}
    ${answer.shown < answer.total && html` · the newest ${count(answer.shown)} of ${count(answer.total)} are listed; search for others`}
    ${answer.processes_answered < answer.processes &&
    html` · <span class="bad">${count(answer.processes_answered)} of ${count(answer.processes)} server processes answered: sessions of the others are missing</span>`}
  </p>`;
}

function Table({ rows, chosen, choose, sort, setFold }) {
  const narrow = useMedia("(max-width: 720px)");
  const now = serverNow();
  const sortBy = (by) => setQuery({ sort: sort.by === by && sort.direction !== "up" ? `${by}-up` : by === "last" ? "" : by });
  return html`<div class="table sessions" role="treegrid" aria-label="Sessions" aria-rowcount=${rows.length + 1}>
    <div class="table-head" role="row" aria-rowindex="1">
      ${COLUMNS.map((column) => {
        const sorted = column.sort && sort.by === column.sort;
        return html`<div
          key=${column.name}
          role="columnheader"
          class=${`col-${column.name}`}
          title=${column.title}
          aria-sort=${sorted ? (sort.direction === "up" ? "ascending" : "descending") : undefined}
        >
          ${column.sort
            ? html`<button type="button" onClick=${() => sortBy(column.sort)}>
                ${column.label}${sorted && html`<span aria-hidden="true">${sort.direction === "up" ? " ↑" : " ↓"}</span>`}
              </button>`
            : column.label}
        </div>`;
      })}
    </div>
    <${VirtualRows}
      role="rowgroup"
      count=${rows.length}
      height=${narrow ? 84 : 40}
      chosen=${chosen}
      rowKey=${(index) => rows[index].session.id}
      rowProps=${(index) => {
        const { session, level, children, folded } = rows[index];
        return {
          role: "row",
          class: `row ${index === chosen ? "is-chosen" : ""} ${session.is_live ? "is-live" : ""}`,
          "aria-level": level,
          "aria-rowindex": index + 2,
          "aria-expanded": children ? String(!folded) : undefined,
          "aria-selected": String(index === chosen),
          onClick: (event) => {
            if (event.target.closest("a, button")) return;
            if (index === chosen || narrow) go(sessionAddress(session.id));
            else choose(index);
          },
        };
      }}
      row=${(index) => html`<${SessionRow} row=${rows[index]} now=${now} chosen=${index === chosen} first=${chosen < 0 && index === 0} setFold=${setFold} />`}
    />
  </div>`;
}

function SessionRow({ row, now, chosen, first, setFold }) {
  const { session, level } = row;
  const link = useRef(null);
  useEffect(() => {
    if (chosen) link.current?.focus({ preventScroll: true });
  }, [chosen]);
  return COLUMNS.map((column) =>
    column.cell
      ? html`<div key=${column.name} role="gridcell" class=${`col-${column.name}`}>
          <span class="cell-label" aria-hidden="true">${column.label}</span>${column.cell(session, now)}
        </div>`
      : html`<div key="session" role="rowheader" class="col-session" style=${{ paddingLeft: `${(Math.min(level, 6) - 1) * 20}px` }}>
          ${row.children > 0
            ? html`<button
                type="button"
                class="fold"
                aria-label=${`${row.folded ? "Unfold" : "Fold"} ${plural(row.children, "sub-session")}`}
                onClick=${() => setFold(session.id)}
              >${row.folded ? "▸" : "▾"}</button>`
            : html`<span class="fold" aria-hidden="true">${level > 1 ? "└" : ""}</span>`}
          <span class=${`dot ${session.running ? "is-running" : session.is_live ? "is-live" : ""}`} aria-hidden="true"></span>
          <a ref=${link} href=${sessionAddress(session.id)} class="clip" title=${session.key} tabindex=${chosen || first ? 0 : -1}>
            <strong>${harnessName(session)}</strong> <span class="key">${sessionName(session)}</span>
          </a>
          ${session.is_agent && html`<span class="tag">sub-agent</span>`}
          ${row.orphan && !session.is_agent && html`<span class="tag" title="its parent session is not in this list">child</span>`}
          <span class="tag tag-plain">${PROTOCOLS[session.protocol] ?? session.protocol}</span>
        </div>`,
  );
}
