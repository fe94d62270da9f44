// One session: what happened, where time and cache went, turn by turn.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { address, go, promptAddress, sessionAddress, setQuery, turnAddress } from "./address.js";
import { mark } from "./compare.js";
import { UNKNOWN, count, dayAndTime, duration, harnessName, partName, percent, plural, sessionName, short, timeOfDay } from "./format.js";
import { html } from "./html.js";
import { useKeys } from "./keyboard.js";
import { connection, follow, serverNow, useLive } from "./live.js";
import { Overview } from "./overview.js";
import { ActionButton, BreakCard, CacheLegend, Empty, Fact, PhaseLegend, Problem, PromptStack, Share, Stack, TurnBars,
  Verdict, awaited, sentence } from "./pieces.js";
import { exported, generation, getJson, saveExport, useAnswer } from "./source.js";
import { median, promptParts, reachOf, sumTimes } from "./times.js";
import { TokenChart } from "./token_chart.js";
import { VirtualRows } from "./virtual_rows.js";
import { useMedia, useTick } from "./watched.js";
import { COURSES, LANES, PHASES, PROTOCOLS, STATUSES } from "./words.js";

const MOST_CHILDREN = 12;
const BREAK_MARK = html`<li title="the prompt of this turn broke"><span class="break-sign" aria-hidden="true">▼</span>break</li>`;
const SHOWN_SHARE = 0.005; // of the time: smaller phases have no words
const PHASES_SHOWN = ["prepare", "queue", "prefill", "reasoning", "text", "call", "tool"];

/**
 * The session's answer with what the stream has said since: each event costs the time of one turn, not of all. What the
 * stream said is newer than any answer, until the stream was opened again.
 */
function useSession(id) {
  const [version, setVersion] = useState(0);
  const answer = useAnswer(`/inspect/api/sessions/${id}`, version);
  const [changes, setChanges] = useState(NO_CHANGES);
  const epoch = generation.value;
  useEffect(() => setChanges(NO_CHANGES), [id, epoch]);
  const data = useMemo(() => (answer.data ? withChanges(answer.data, changes) : null), [answer.data, changes]);
  const counted = useRef(0);
  useLive((batch) => {
    const turns = [...batch.turns.values()].filter((turn) => turn.session === id);
    const session = batch.sessions.get(id);
    const born = [...batch.sessions.values()].filter((each) => each.parent === id).map((each) => each.id);
    const gone = batch.gone.has(id);
    if (!session && !turns.length && !born.length && !gone) return;
    setChanges((old) => ({
      session: session ?? old.session,
      turns: turns.length ? new Map([...old.turns, ...turns.map((turn) => [turn.id, turn])]) : old.turns,
      children: born.length ? [...old.children, ...born] : old.children,
      gone: gone || old.gone,
    }));
    if (!data) return;
    const lanes = new Set(data.lanes.map((lane) => lane.number));
    // Turns that began and ended between the first answer and the start of the stream are in the session's counts only.
    const known = new Set([...data.turns, ...turns].map((turn) => turn.id)).size;
    const expected = session ? session.turns + session.retries : 0;
    const missed = expected > known && expected !== counted.current;
    if (missed) counted.current = expected;
    if (missed || turns.some((turn) => !lanes.has(turn.lane))) setVersion((n) => n + 1);
  });
  const children = data?.children.length ?? 0;
  useEffect(() => follow(children ? null : id), [id, children > 0]);
  return { data, error: answer.error, gone: changes.gone };
}

const NO_CHANGES = { session: null, turns: new Map(), children: [], gone: false };

function withChanges(data, changes) {
  return {
    ...data,
    session: changes.session ?? data.session,
    children: [...new Set([...data.children, ...changes.children])],
    turns: changes.turns.size ? withTurns(data.turns, [...changes.turns.values()]) : data.turns,
  };
}

function withTurns(turns, changed) {
  const left = new Map(changed.map((turn) => [turn.id, turn]));
  const next = turns.map((turn) => {
    const newer = left.get(turn.id);
    if (newer) left.delete(turn.id);
    return newer ?? turn;
  });
  return [...next, ...left.values()];
}

/** What the breaks of a session cost, by cause, the dearest first. */
function causesOf(turns) {
  const causes = new Map();
  for (const turn of turns) {
    if (!turn.break || turn.repeats) continue;
    const { cause, says, cure, lost_tokens: tokens, lost_ms: ms } = turn.break;
    const entry = causes.get(cause) ?? { cause, says, cure, tokens: 0, ms: 0, turns: [] };
    entry.tokens += tokens;
    entry.ms += ms ?? 0;
    entry.turns.push(turn);
    causes.set(cause, entry);
  }
  return [...causes.values()].sort((a, b) => b.tokens - a.tokens);
}

/** Rows of the list: turns, each with its retries behind it where they are unfolded. */
function rowsOf(turns, lane, unfolded) {
  const repeats = new Map();
  const known = new Set(turns.map((turn) => turn.id));
  for (const turn of turns) {
    if (turn.repeats && known.has(turn.repeats)) repeats.set(turn.repeats, [...(repeats.get(turn.repeats) ?? []), turn]);
  }
  const rows = [];
  const place = (turn, level) => {
    const retries = repeats.get(turn.id) ?? [];
    rows.push({ turn, level, retries: retries.length, open: unfolded.has(turn.id) });
    if (unfolded.has(turn.id)) retries.forEach((retry) => place(retry, level + 1));
  };
  for (const turn of turns) {
    if (turn.repeats && known.has(turn.repeats)) continue;
    if (lane == null || turn.lane === lane) place(turn, 0);
  }
  return rows;
}

export function SessionView({ id }) {
  const answer = useSession(id);
  if (!answer.data) return html`<div class="page">${answer.gone ? html`<${GoneAway} />` : awaited(answer)}</div>`;
  return html`<${Session} key=${id} id=${id} data=${answer.data} gone=${answer.gone} error=${answer.error} />`;
}

const GoneAway = () => html`<${Empty} title="This session has left the server's memory.">
  The inspector keeps the newest sessions. <a href="#/sessions">All sessions</a>
<//>`;

function Session({ id, data, gone, error }) {
  const { session, turns } = data;
  const query = address.value.query;
  const lane = query.get("lane") ? Number(query.get("lane")) : null;
  const [unfolded, setUnfolded] = useState(new Set());
  const [chosenId, setChosen] = useState(query.get("turn"));
  const running = turns.some((turn) => turn.status === "running");
  useTick(running && !exported ? 250 : 0);
  const rows = useMemo(() => rowsOf(turns, lane, unfolded), [turns, lane, unfolded]);
  const listed = useMemo(() => rows.filter((row) => row.level === 0).map((row) => row.turn), [rows]);
  const causes = useMemo(() => causesOf(turns), [turns]);
  const chosen = rows.findIndex((row) => row.turn.id === chosenId);
  const choose = (turn) => {
    if (!turn) return;
    setChosen(turn.id);
    setQuery({ turn: turn.id });
  };
  const move = (index) => choose(rows[Math.max(0, Math.min(rows.length - 1, index))]?.turn);
  const turn = rows[chosen]?.turn;
  useKeys({
    j: () => move(chosen + 1),
    ArrowDown: () => move(chosen + 1),
    k: () => move(chosen < 0 ? 0 : chosen - 1),
    ArrowUp: () => move(chosen < 0 ? 0 : chosen - 1),
    Home: () => move(0),
    End: () => move(rows.length - 1),
    Enter: () => (turn ? go(turnAddress(id, turn.id)) : false),
    p: () => (turn ? go(promptAddress(id, turn.id)) : false),
    b: () => {
      const broken = rows.findIndex((row, index) => index > chosen && row.turn.break);
      return move(broken >= 0 ? broken : rows.findIndex((row) => row.turn.break));
    },
    x: () => mark(turn?.id ?? id, turn ? `turn ${turn.number}` : sessionName(session)),
    e: () => document.getElementById("export")?.focus(),
  });
  return html`<div class="page session-page">
    <${Head} data=${data} turns=${turns} />
    ${gone && html`<${GoneAway} />`} ${error && html`<${Problem} error=${error} />`}
    <div class="cards">
      <${CacheCard} session=${session} turns=${turns} causes=${causes} choose=${choose} />
      <${TimeCard} turns=${listed} />
    </div>
    <section class="card" aria-label="Timeline">
      <div class="card-head">
        <h2>Timeline</h2>
        <${PhaseLegend} kinds=${PHASES_SHOWN} more=${BREAK_MARK} />
      </div>
      <${Lanes} data=${data} chosen=${chosenId} choose=${choose} />
    </section>
    <section class="card" aria-label="Prompt tokens by turn">
      <div class="card-head">
        <h2>Prompt tokens by turn</h2>
        <${CacheLegend} more=${BREAK_MARK} />
      </div>
      ${listed.length ? html`<${TokenChart} turns=${listed} chosen=${chosenId} onChoose=${choose} />` : html`<p>No turn yet.</p>`}
    </section>
    <div class="turns-and-chosen">
      <${Turns}
        id=${id}
        data=${data}
        rows=${rows}
        chosen=${chosen}
        choose=${choose}
        lane=${lane}
        unfold=${(which) => {
          const next = new Set(unfolded);
          if (!next.delete(which)) next.add(which);
          setUnfolded(next);
        }}
      />
      ${turn && html`<${Chosen} id=${id} turn=${turn} lanes=${data.lanes} />`}
    </div>
  </div>`;
}

function Head({ data, turns }) {
  const { session } = data;
  const missing = data.processes - data.processes_answered;
  return html`<header class="page-head">
    <div>
      <h1>
        ${harnessName(session)} <span class="key" title=${session.key}>${sessionName(session)}</span>${" "}
        ${session.running > 0
          ? html`<span class="tag tag-live">running</span>`
          : session.is_live && html`<span class="tag tag-live">live</span>`}
        ${session.is_agent && html` <span class="tag">sub-agent</span>`}
      </h1>
      <p class="dim">
        ${session.models.join(", ")} · ${PROTOCOLS[session.protocol] ?? session.protocol}
        ${` · ${dayAndTime(session.first_at)} to ${timeOfDay(session.last_at)}`}
        ${session.parent && html` · sub-session of <a href=${sessionAddress(session.parent)}>its parent</a>`}
        ${session.client && html` · <span class="clip" title=${session.client}>${session.client}</span>`}
      </p>
      ${missing > 0 && html`<p class="bad">${plural(missing, "server process", "server processes")} did not answer: turns may be missing.</p>`}
      ${data.dropped_turns > 0 && html`<p class="dim">${plural(data.dropped_turns, "older turn")} left the server's memory.</p>`}
    </div>
    ${!exported && html`<details class="menu">
      <summary id="export">Export</summary>
      <div>
        <p>One HTML file that opens without a server.</p>
        <${ActionButton} act=${() => saveExport(session.id, true)}>With texts<//>
        <${ActionButton} act=${() => saveExport(session.id, false)}>Without texts<//>
      </div>
    </details>`}
  </header>`;
}

const MISSED = ["engine_evicted", "engine_restarted", "other_worker"];

/** What was read again by fault, and how long engines worked, by the receipts of the turns. */
function sumReceipts(turns) {
  const faults = {};
  let ms = 0;
  for (const { receipt, repeats } of turns) {
    if (!receipt || repeats) continue;
    ms += (receipt.prefill_seconds + receipt.decode_seconds) * 1000;
    for (const [fault, tokens] of Object.entries(receipt.reread_by_fault)) faults[fault] = (faults[fault] ?? 0) + tokens;
  }
  return { faults: Object.entries(faults), ms };
}

function CacheCard({ session, turns, causes, choose }) {
  const parts = useMemo(() => {
    const sums = { cached: 0, evicted: 0, lost: 0, fresh: 0 };
    for (const turn of turns) {
      if (turn.repeats) continue;
      const each = promptParts(turn);
      for (const kind of Object.keys(sums)) sums[kind] += each[kind];
    }
    return sums;
  }, [turns]);
  const again = useMemo(() => sumReceipts(turns), [turns]);
  const evicted = turns.filter((turn) => !turn.repeats && MISSED.includes(turn.verdict?.kind));
  return html`<section class="card" aria-label="Where the cache went">
    <h2>Cache</h2>
    <dl class="facts">
      <${Fact} label="prompt tokens">${short(session.prompt_tokens)}<//>
      <${Fact} label="in place" title="continue the last prompt and turn"><${Share} part=${session.share_in_place} /><//>
      <${Fact} label="cached" title="reported by the engine">
        ${session.cached_tokens == null ? "not reported" : html`<${Share} part=${session.share_cached} />`}
      <//>
      <${Fact} label="lost to breaks">
        ${session.lost_tokens ? html`<span class="bad">${short(session.lost_tokens)}${session.lost_ms ? `, about ${duration(session.lost_ms)}` : ""}</span>` : "none"}
      <//>
    </dl>
    <dl class="facts">
      <${Fact} label="read again, by fault">
        ${again.faults.length ? again.faults.map(([fault, tokens]) => `${fault} ${short(tokens)}`).join(", ") : "none"}
      <//>
      <${Fact} label="engine" title="prefill and decode of all turns">${duration(again.ms)}<//>
    </dl>
    <${Stack} label="prompt tokens" unit=${short} parts=${[
      ["cached", parts.cached, session.cached_tokens == null ? "in place" : "cached"],
      ["evicted", parts.evicted, "in place, not cached"],
      ["lost", parts.lost, "lost"],
      ["fresh", parts.fresh, "new"],
    ]} />
    ${causes.length === 0 && evicted.length === 0 && html`<p class="good-word">✓ ${turns.length < 2 ? "One prompt so far: there is none before it to continue." : "Every prompt continued the one before. Nothing to do."}</p>`}
    ${causes.map((cause) => html`<div class="cause" key=${cause.cause}>
      <p><span class="bad">✕ ${plural(cause.turns.length, "break")}</span>: ${cause.says}; ${count(cause.tokens)} tokens${cause.ms ? `, about ${duration(cause.ms)}` : ""}. In ${cause.turns.slice(0, 6).map((turn, index) => html`${index ? ", " : ""}<button type="button" class="link" key=${turn.id} onClick=${() => choose(turn)}>turn ${turn.number}</button>`)}${cause.turns.length > 6 ? " …" : "."}</p>
      <p class="cure"><strong>Cure:</strong> ${sentence(cause.cure)}</p>
    </div>`)}
    ${evicted.length > 0 && html`<p class="cause"><span class="warn">▽ ${plural(evicted.length, "turn")}</span> continued the prompt, but the engine had dropped ${count(evicted.reduce((sum, turn) => sum + turn.verdict.missing_tokens, 0))} of its tokens: the cure is more cache at the engine, not another prompt.</p>`}
  </section>`;
}

function TimeCard({ turns }) {
  const sums = sumTimes(turns);
  const shown = Object.entries(sums).filter(([, ms]) => ms > 0);
  const working = shown.reduce((sum, [kind, ms]) => sum + (kind === "gap" ? 0 : ms), 0);
  return html`<section class="card" aria-label="Where the time went">
    <h2>Time</h2>
    <dl class="facts">
      <${Fact} label="working" title="all phases of all turns, without the gaps">${duration(working)}<//>
      <${Fact} label="first token" title="median">${duration(median(turns.map((turn) => turn.times.first_token_ms)))}<//>
      <${Fact} label="tokens per second" title="median while decoding">${speed(turns)}<//>
      <${Fact} label="waiting for the user" title="gaps behind turns without calls">${duration(sums.gap)}<//>
    </dl>
    <${Stack} label="time" unit=${duration} total=${working} parts=${shown.filter(([kind]) => kind !== "gap").map(([kind, ms]) => [kind, ms, PHASES[kind].label])} />
    <ul class="legend sums">
      ${shown.filter(([kind, ms]) => kind !== "gap" && ms / working >= SHOWN_SHARE).sort((a, b) => b[1] - a[1]).map(([kind, ms]) => html`<li key=${kind} title=${PHASES[kind].says}>
        <span class=${`swatch fill-${kind}`} aria-hidden="true"></span>${PHASES[kind].label} <strong>${duration(ms)}</strong>
        <span class="dim">${percent(ms / working)}</span>
      </li>`)}
    </ul>
  </section>`;
}

function speed(turns) {
  const rate = median(
    turns.map(({ tokens, times }) => (times.decode_ms > 0 && tokens.generated > 1 ? (tokens.generated / times.decode_ms) * 1000 : null)),
  );
  return rate == null ? UNKNOWN : count(rate);
}

export function laneName(lane) {
  const words = LANES[lane.kind] ?? LANES.conversation;
  return lane.kind === "main" ? words.label : `${words.label} ${lane.number}`;
}

/** The session's lanes, and those of its sub-sessions, on one axis. */
function Lanes({ data, chosen, choose }) {
  const [children, setChildren] = useState([]);
  const ids = data.children.slice(0, MOST_CHILDREN).join();
  useEffect(() => {
    let current = true;
    const paths = ids ? ids.split(",").map((id) => `/inspect/api/sessions/${id}`) : [];
    Promise.allSettled(paths.map((path) => getJson(path))).then((answers) => {
      if (current) setChildren(answers.filter((each) => each.status === "fulfilled").map((each) => each.value));
    });
    return () => (current = false);
  }, [ids]);
  useLive((batch) =>
    setChildren((old) =>
      old.map((child) => {
        const changed = [...batch.turns.values()].filter((turn) => turn.session === child.session.id);
        return changed.length ? { ...child, turns: withTurns(child.turns, changed) } : child;
      }),
    ),
  );
  const lanes = useMemo(() => {
    const byNumber = new Map(data.lanes.map((lane) => [lane.number, { name: laneName(lane), title: LANES[lane.kind]?.says ?? "", turns: [] }]));
    for (const turn of data.turns) byNumber.get(turn.lane)?.turns.push(turn);
    const own = [...byNumber.values()].filter((lane) => lane.turns.length);
    const theirs = children.map((child) => ({
      name: `↳ ${child.session.is_agent ? "sub-agent" : "child"} ${partName(child.session)}`,
      title: `sub-session ${child.session.key}`,
      href: sessionAddress(child.session.id),
      turns: child.turns,
    }));
    return [...own, ...theirs];
  }, [data.lanes, data.turns, children]);
  if (!lanes.length) return html`<p>No turn yet.</p>`;
  const open = (turn) => (turn.session === data.session.id ? choose(turn) : go(turnAddress(turn.session, turn.id)));
  return html`<${Overview} lanes=${lanes} chosen=${chosen} onChoose=${open} />
    ${data.children.length > MOST_CHILDREN && html`<p class="dim">${plural(data.children.length - MOST_CHILDREN, "further sub-session")} in the list of sessions.</p>`}`;
}

const COLUMNS = [
  ["number", "Turn"], ["lane", "Lane"], ["prompt", "Prompt"], ["cache", "Cache"], ["out", "Out"], ["first", "First"],
  ["total", "Total"], ["time", "Time"], ["end", "Ends with"],
];

function Turns({ id, data, rows, chosen, choose, lane, unfold }) {
  const narrow = useMedia("(max-width: 720px)");
  const lanes = new Map(data.lanes.map((each) => [each.number, each]));
  const now = serverNow();
  const scale = useMemo(() => {
    const reaches = rows.map((row) => reachOf(row.turn, now)).sort((a, b) => a - b);
    return (reaches[Math.floor(reaches.length * 0.95)] ?? 1000) * 1.05 || 1000;
  }, [rows]);
  const largest = useMemo(() => rows.reduce((most, row) => Math.max(most, row.turn.tokens.prompt ?? 0), 1), [rows]);
  return html`<section class="turns" aria-label="Turns">
    <div class="card-head">
      <h2>Turns</h2>
      ${data.lanes.length > 1 && html`<label>
        <span class="visually-hidden">Lane</span>
        <select value=${lane ?? ""} onChange=${(event) => setQuery({ lane: event.target.value })}>
          <option value="">all lanes</option>
          ${data.lanes.map((each) => html`<option key=${each.number} value=${each.number}>${laneName(each)} (${each.turns.length})</option>`)}
        </select>
      </label>`}
      <span class="dim" role="status">${plural(rows.length, "row")} · bars up to ${duration(scale)}</span>
    </div>
    <div class="table turn-table" role="treegrid" aria-label="Turns" aria-rowcount=${rows.length + 1}>
      <div class="table-head" role="row" aria-rowindex="1">
        ${COLUMNS.map(([name, label]) => html`<div key=${name} role="columnheader" class=${`col-${name}`}>${label}</div>`)}
      </div>
      <${VirtualRows}
        role="rowgroup"
        count=${rows.length}
        height=${narrow ? 76 : 34}
        chosen=${chosen}
        rowKey=${(index) => rows[index].turn.id}
        rowProps=${(index) => ({
          role: "row",
          class: `row ${index === chosen ? "is-chosen" : ""} ${rows[index].turn.break ? "is-broken" : ""} ${rows[index].level ? "is-retry" : ""}`,
          "aria-rowindex": index + 2,
          "aria-level": rows[index].level + 1,
          "aria-expanded": rows[index].retries ? String(rows[index].open) : undefined,
          "aria-selected": String(index === chosen),
          onClick: (event) => {
            if (event.target.closest("a, button")) return;
            if (index === chosen || narrow) go(turnAddress(id, rows[index].turn.id));
            else choose(rows[index].turn);
          },
        })}
        row=${(index) => html`<${TurnRow}
          id=${id}
          row=${rows[index]}
          lane=${lanes.get(rows[index].turn.lane)}
          chosen=${index === chosen}
          first=${chosen < 0 && index === 0}
          scale=${scale}
          largest=${largest}
          now=${now}
          unfold=${unfold}
        />`}
      />
    </div>
    ${!rows.length && html`<${Empty} title="No turn in this lane." />`}
  </section>`;
}

function TurnRow({ id, row, lane, chosen, first, scale, largest, now, unfold }) {
  const { turn } = row;
  const link = useRef(null);
  useEffect(() => {
    if (chosen) link.current?.focus({ preventScroll: true });
  }, [chosen]);
  const course = COURSES[turn.course] ?? COURSES.first;
  return html`
    <div role="rowheader" class="col-number">
      <span class=${`course course-${turn.course}`} title=${`${course.label}: ${course.says}`}><span aria-hidden="true">${course.mark}</span><span class="visually-hidden">${course.label}</span></span>
      <a ref=${link} href=${turnAddress(id, turn.id)} tabindex=${chosen || first ? 0 : -1}><span class="visually-hidden">Turn </span>${turn.number}</a>
      ${row.level > 0 && html`<span class="tag">retry</span>`}
      ${row.retries > 0 && html`<button type="button" class="tag" aria-label=${`${row.open ? "Fold" : "Unfold"} ${plural(row.retries, "retry", "retries")}`} onClick=${() => unfold(turn.id)}>↻ ${row.retries}</button>`}
    </div>
    <div role="gridcell" class="col-lane">${lane && html`<span class=${`tag lane-${lane.kind}`} title=${LANES[lane.kind]?.says}>${laneName(lane)}</span>`}</div>
    <div role="gridcell" class="col-prompt">${short(turn.tokens.prompt)}</div>
    <div role="gridcell" class="col-cache">
      <${PromptStack} turn=${turn} total=${largest} />
    </div>
    <div role="gridcell" class="col-out">${short(turn.tokens.generated)}</div>
    <div role="gridcell" class="col-first">${duration(turn.times.first_token_ms)}</div>
    <div role="gridcell" class="col-total">${duration(turn.times.total_ms)}</div>
    <div role="gridcell" class="col-time"><${TurnBars} turn=${turn} scale=${scale} now=${now} /></div>
    <div role="gridcell" class="col-end"><${Ending} turn=${turn} /></div>`;
}

function Ending({ turn }) {
  if (turn.status === "running") return html`<span class="live-word">running</span>`;
  if (turn.status === "error") return html`<span class="bad" title=${turn.error?.message}>✕ ${turn.error?.type ?? "error"}</span>`;
  if (turn.status !== "done") return html`<span class="warn">${STATUSES[turn.status] ?? turn.status}</span>`;
  const broken = turn.break && html`<span class="bad" title=${turn.break.says}>✕ ${turn.break.cause}</span> `;
  const missed = MISSED.includes(turn.verdict?.kind) && html`<${Verdict} verdict=${turn.verdict} /> `;
  const names = turn.calls.map((call) => call.name);
  const words = names.length ? names.slice(0, 3).join(", ") + (names.length > 3 ? ` +${names.length - 3}` : "") : turn.finish === "stop" ? "answer" : turn.finish;
  return html`${broken}${missed}<span class=${names.length ? "call-names" : "dim"} title=${names.join(", ")}>${words}</span>`;
}

/** The chosen turn in words, beside the list. */
function Chosen({ id, turn, lanes }) {
  const lane = lanes.find((each) => each.number === turn.lane);
  const from = lane?.from;
  const verdict = turn.verdict;
  return html`<aside class="card chosen" aria-label=${`Turn ${turn.number}`}>
    <div class="card-head">
      <h2>Turn ${turn.number}</h2>
      <${Verdict} verdict=${verdict} />
    </div>
    <p>${sentence(verdict.says)}${verdict.missing_tokens > 0 && html` ${count(verdict.missing_tokens)} tokens were missing${verdict.missing_ms ? `, about ${duration(verdict.missing_ms)}` : ""}.`}</p>
    ${turn.break && html`<${BreakCard} broken=${turn.break} level=${3} />`}
    ${turn.error && html`<p class="bad" role="alert">${turn.error.type}: ${turn.error.message ?? ""}</p>`}
    <dl class="facts">
      <${Fact} label="prompt">${count(turn.tokens.prompt)}<//>
      <${Fact} label="in place">${count(turn.tokens.matched)}<//>
      <${Fact} label="cached">${turn.tokens.cached == null ? "not reported" : count(turn.tokens.cached)}<//>
      <${Fact} label="not in place">${count(turn.tokens.new)}<//>
      <${Fact} label="generated">${count(turn.tokens.generated)}<//>
      <${Fact} label="replayed turns">${count(turn.tokens.replayed_turns)}<//>
      <${Fact} label="first token">${duration(turn.times.first_token_ms)}<//>
      <${Fact} label="total">${duration(turn.times.total_ms)}<//>
      <${Fact} label="arrived">${timeOfDay(turn.received_at)}<//>
    </dl>
    ${turn.calls.length > 0 && html`<ul class="calls">
      ${turn.calls.map((call) => html`<li key=${call.index}><strong>${call.name}</strong>
        <span class="dim"> dispatched at ${duration(call.dispatched_ms)}; ${call.tool_ms == null ? "no result yet" : `ran ${duration(call.tool_ms)}`}</span>
        ${call.is_error && html` <span class="bad">✕ failed</span>`}</li>`)}
    </ul>`}
    ${from && turn.id === lane.turns[0] && html`<p class="dim">This lane ${LANES[lane.kind]?.says}: it has ${count(from.tokens)} tokens in common with lane ${from.lane}.</p>`}
    ${turn.rules.length > 0 && html`<p class="dim">Rules: ${turn.rules.map((rule) => html`<code key=${rule}>${rule}</code> `)}</p>`}
    <p class="links">
      <a class="button" href=${turnAddress(id, turn.id)}>Tokens and events <kbd>Enter</kbd></a>
      <a class="button" href=${promptAddress(id, turn.id)}>Prompt <kbd>p</kbd></a>
    </p>
  </aside>`;
}
