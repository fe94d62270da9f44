// The stream of what happens now. It is read with fetch, since EventSource cannot send the API key.
import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { exported, generation, keyVersion, request } from "./source.js";

/** "connecting", "live", "waiting" (to connect again) or "off" (an exported file). */
export const connection = signal(exported ? "off" : "connecting");
/** Seconds since 1970 by the server's clock: its difference to this machine's is known after the first event. */
export const serverNow = () => Date.now() / 1000 + clockOffset;

const SILENCE_MS = 25_000; // The server sends a comment every 10 s.
const FLUSH_MS = 150;
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 8_000;

const listeners = new Set();
let clockOffset = 0;
let waiting = emptyBatch();
let flushing = null;
let followed = null;
let current = null;

function emptyBatch() {
  return { turns: new Map(), sessions: new Map(), gone: new Set() };
}

/** Follow one session, or all with null. Connects again only where that differs. */
export function follow(session) {
  if (exported || (current && followed === session)) return;
  followed = session;
  connect();
}

function connect() {
  current?.abort();
  current = new AbortController();
  void read(current.signal);
}

keyVersion.subscribe(() => current && connect());

/** Call `listener` with what is new, at most a few times a second: {turns, sessions: Map by id, gone: Set}. */
export function useLive(listener) {
  const latest = useRef(listener);
  latest.current = listener;
  useEffect(() => {
    const call = (batch) => latest.current(batch);
    listeners.add(call);
    return () => listeners.delete(call);
  }, []);
}

async function read(stopped) {
  let wait = FIRST_WAIT_MS;
  for (let attempt = 0; !stopped.aborted; attempt += 1) {
    const attemptStopped = new AbortController();
    const stop = () => attemptStopped.abort();
    stopped.addEventListener("abort", stop);
    try {
      const path = `/inspect/api/events${followed ? `?session=${followed}` : ""}`;
      const response = await request(path, { signal: attemptStopped.signal });
      if (stopped.aborted) return;
      if (attempt) generation.value += 1; // States in between were missed.
      connection.value = "live";
      wait = FIRST_WAIT_MS;
      await readEvents(response.body, attemptStopped);
    } catch (error) {
      if (stopped.aborted) return;
      if (error.status && error.status < 500) wait = LONGEST_WAIT_MS;
    } finally {
      stopped.removeEventListener("abort", stop);
      attemptStopped.abort();
    }
    if (stopped.aborted) return;
    connection.value = "waiting";
    await new Promise((resolve) => setTimeout(resolve, wait));
    wait = Math.min(wait * 2, LONGEST_WAIT_MS);
  }
}

async function readEvents(body, stopped) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  let timer;
  try {
    for (;;) {
      timer = setTimeout(() => stopped.abort(), SILENCE_MS);
      const { value, done } = await reader.read();
      clearTimeout(timer);
      if (done) return;
      buffer += value.replaceAll("\r", "");
      const blocks = buffer.split("\n\n");
      buffer = blocks.pop();
      blocks.forEach(take);
    }
  } finally {
    clearTimeout(timer);
  }
}

function take(block) {
  let name = "";
  let data = "";
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data += line.slice(5);
  }
  if (!data) return;
  const value = JSON.parse(data);
  if (name === "hello") {
    clockOffset = value.now - Date.now() / 1000;
    for (const session of value.sessions) waiting.sessions.set(session.id, session);
  } else if (name === "turn") {
    waiting.turns.set(value.turn.id, value.turn);
    waiting.sessions.set(value.session.id, value.session);
  } else if (name === "stale") {
    generation.value += 1; // The server had more for this page than it keeps.
  } else if (name === "gone") {
    for (const id of value.sessions) waiting.gone.add(id);
  }
  flushing ??= setTimeout(flush, FLUSH_MS);
}

function flush() {
  const batch = waiting;
  waiting = emptyBatch();
  flushing = null;
  for (const listener of listeners) listener(batch);
}
