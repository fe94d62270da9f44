// The page: its bar, the view of the present address, and keys that work everywhere.
import "uplot/dist/uPlot.min.css";
import "./style.css";
import "@preact/signals";
import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { address, go, sessionAddress } from "./address.js";
import { MarkedBar, marked } from "./compare.js";
import { DifferenceView } from "./difference_view.js";
import { dayAndTime } from "./format.js";
import { html } from "./html.js";
import { useKeys } from "./keyboard.js";
import { connection } from "./live.js";
import { Empty } from "./pieces.js";
import { PromptView } from "./prompt_view.js";
import { SessionView } from "./session_view.js";
import { SessionsView } from "./sessions_view.js";
import { SidesView } from "./sides_view.js";
import { exported, needsKey, useKey } from "./source.js";
import { nextTheme, theme } from "./theme.js";
import { TurnView } from "./turn_view.js";
import { KEYS } from "./words.js";

const CONNECTIONS = {
  connecting: "connecting …",
  live: "live",
  waiting: "no connection, trying again …",
};

function Page() {
  const { parts, query } = address.value;
  const [help, setHelp] = useState(false);
  useEffect(() => {
    document.title = titleOf(parts);
    window.scrollTo(0, 0);
  }, [parts.join("/")]);
  useKeys({
    "?": () => setHelp(true),
    t: nextTheme,
    g: () => !exported && go("/sessions"),
    Escape: () => {
      if (parts.length === 2 && !exported) go("/sessions");
      else if (parts[0] === "difference" || parts[0] === "sides") history.back();
      else return false;
      return true;
    },
  }, 0);
  useKeys({ Escape: () => (marked.value ? (marked.value = null) === null : false) }, 2);
  return html`
    <a class="skip" href="#main" onClick=${(event) => {
      event.preventDefault();
      document.getElementById("main").focus();
    }}>Skip to the content</a>
    <${Bar} parts=${parts} onHelp=${() => setHelp(true)} />
    <main id="main" tabindex="-1">${needsKey.value ? html`<${KeyForm} />` : viewOf(parts, query)}</main>
    <${MarkedBar} />
    ${help && html`<${Help} onClose=${() => setHelp(false)} />`}`;
}

function viewOf(parts, query) {
  const [place, session, turns, turn, prompt] = parts;
  if (place === "difference") return html`<${DifferenceView} a=${query.get("a")} b=${query.get("b")} />`;
  if (place === "sides") return html`<${SidesView} a=${query.get("a")} b=${query.get("b")} />`;
  if (place !== "sessions" && place != null) {
    return html`<div class="page"><${Empty} title="There is nothing at this address."><a href="#/sessions">All sessions</a><//></div>`;
  }
  if (exported && !session) return html`<${SessionView} id=${exported.session} />`;
  if (!session) return html`<${SessionsView} />`;
  if (turns !== "turns" || !turn) return html`<${SessionView} id=${session} />`;
  return prompt === "prompt"
    ? html`<${PromptView} session=${session} id=${turn} />`
    : html`<${TurnView} session=${session} id=${turn} />`;
}

function titleOf([place, session, , turn, prompt]) {
  const names = [prompt && "prompt", turn && "turn", session, ["difference", "sides"].includes(place) && place].filter(Boolean);
  return `${names.length ? `${names.join(" · ")} · ` : ""}singletree inspector`;
}

function Bar({ parts, onHelp }) {
  const [place, session, , turn, prompt] = parts;
  const steps = exported ? [] : [["Sessions", "#/sessions"]];
  if (place === "difference") steps.push(["Difference", null]);
  else if (place === "sides") steps.push(["Two sessions", null]);
  else if (session || exported) {
    steps.push(["Session", sessionAddress(session ?? exported.session)]);
    if (turn) steps.push([prompt ? "Turn" : "Turn", `${sessionAddress(session)}/turns/${turn}`]);
    if (prompt) steps.push(["Prompt", null]);
  }
  return html`<header class="top-bar">
    <span class="brand"><svg viewBox="0 0 16 16" width="18" height="18" aria-hidden="true"><path d="M8 1 3 8h3l-3.5 5H7v2h2v-2h4.500L10 8h3z" fill="currentColor" /></svg> singletree</span>
    <nav class="crumbs" aria-label="Where you are">
      <ol>
        ${steps.map(([words, href], index) => html`<li key=${words + index}>
          ${href && index < steps.length - 1 ? html`<a href=${href}>${words}</a>` : html`<span aria-current="page">${words}</span>`}
        </li>`)}
      </ol>
    </nav>
    ${exported
      ? html`<span class="tag">exported ${dayAndTime(exported.made_at)}${exported.with_texts ? "" : "; texts were removed"}</span>`
      : html`<span class=${`connection is-${connection.value}`} role="status"><span class="dot" aria-hidden="true"></span>${CONNECTIONS[connection.value]}</span>`}
    <button type="button" class="quiet" onClick=${nextTheme} title="light, dark or the system's colours (t)">
      <span aria-hidden="true">◐</span><span class="wide-only"> ${theme.value}</span><span class="visually-hidden"> colours</span>
    </button>
    <button type="button" class="quiet" onClick=${onHelp} aria-label="Keys and colours">?</button>
  </header>`;
}

function Help({ onClose }) {
  const dialog = useRef(null);
  useEffect(() => dialog.current.showModal(), []);
  return html`<dialog ref=${dialog} class="help" aria-labelledby="help-title" onClose=${onClose} onClick=${(event) => {
    if (event.target === dialog.current) dialog.current.close();
  }}>
    <div class="card-head"><h2 id="help-title">Keys</h2><button type="button" autofocus onClick=${() => dialog.current.close()}>Close</button></div>
    <div class="help-groups">
      ${KEYS.map(([group, keys]) => html`<section key=${group}><h3>${group}</h3>
        <dl>${keys.map(([key, words]) => html`<div key=${key}><dt>${key.split("  ").map((one) => html`<kbd key=${one}>${one}</kbd> `)}</dt><dd>${words}</dd></div>`)}</dl>
      </section>`)}
    </div>
  </dialog>`;
}

function KeyForm() {
  const [key, setKey] = useState("");
  const field = useRef();
  useEffect(() => field.current.focus(), []);
  return html`<form class="empty key-form" onSubmit=${(event) => {
    event.preventDefault();
    useKey(key.trim());
  }}>
    <p class="empty-title">This server wants an API key.</p>
    ${needsKey.value === "refused" && html`<p class="bad" role="alert">It refuses the key that was given.</p>`}
    <p>It is the one that harnesses send (<code>--api-key</code>). It stays in this tab.</p>
    <label>API key <input ref=${field} type="password" autocomplete="off" required value=${key} onInput=${(event) => setKey(event.target.value)} /></label>
    <button type="submit">Open</button>
  </form>`;
}

render(html`<${Page} />`, document.getElementById("app"));
