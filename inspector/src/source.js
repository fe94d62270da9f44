// Where answers come from: the server's API, or the data inside an exported file.
import { signal } from "@preact/signals";
import { useEffect, useRef, useState } from "preact/hooks";
import { takeKey } from "./address.js";

const STORED_KEY = "singletree-key";

/** The data of an exported file, or null. */
export const exported = readExported();
/** Counts up when everything has to be fetched again: after a reconnect, or with another key. */
export const generation = signal(0);
/** Why the page asks for a key: "missing" or "refused"; empty where it need not. */
export const needsKey = signal("");
/** Counts up with every key that is given. */
export const keyVersion = signal(0);

function readExported() {
  const element = document.getElementById("singletree-export");
  return element ? JSON.parse(element.textContent) : null;
}

let apiKey = exported ? null : (takeKey() ?? sessionStorage.getItem(STORED_KEY));
if (apiKey) sessionStorage.setItem(STORED_KEY, apiKey);

export function useKey(key) {
  apiKey = key;
  sessionStorage.setItem(STORED_KEY, key);
  needsKey.value = "";
  keyVersion.value += 1;
  generation.value += 1;
}

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Fetch from the server with the key. Throws ApiError with the server's own words. */
export async function request(path, options = {}) {
  const headers = apiKey ? { authorization: `Bearer ${apiKey}` } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer. The page tries again by itself.");
  }
  if (response.ok) return response;
  if (response.status === 401) needsKey.value = apiKey ? "refused" : "missing";
  let message = `The server answered ${response.status} ${response.statusText}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // The answer is not the API's own, for instance that of a proxy.
  }
  throw new ApiError(response.status, message);
}

export async function getJson(path, options) {
  if (!exported) return (await request(path, options)).json();
  const answer = exported.answers[path.split("?")[0]];
  if (!answer) throw new ApiError(404, "The exported file does not contain this.");
  return answer;
}

/**
 * Fetch an answer of the API and keep it. While the same path is fetched again, the old answer stays. A fetch that runs
 * is not ended by the wish for a newer answer: with many events, none would ever arrive.
 * @param {string|null} path null fetches nothing
 * @param {unknown} [version] fetches again when it changes
 * @returns {{data: any, error: ApiError|null}}
 */
export function useAnswer(path, version) {
  const [state, setState] = useState({ path: null, data: null, error: null });
  const loader = useRef(null);
  const wished = `${version} ${generation.value}`;
  useEffect(() => {
    if (!path) return undefined;
    const stopped = new AbortController();
    loader.current = { path, wished, load: loadAgain(path, stopped.signal, setState) };
    loader.current.load();
    return () => stopped.abort();
  }, [path]);
  useEffect(() => {
    if (!path || loader.current.wished === wished) return;
    loader.current.wished = wished;
    loader.current.load();
  }, [wished]);
  const current = state.path === path;
  return { data: current ? state.data : null, error: current ? state.error : null };
}

/** Return a function that fetches `path`; called while it fetches, it fetches once more afterwards. */
function loadAgain(path, signal, setState) {
  let busy = false;
  let again = false;
  return async () => {
    again = true;
    if (busy) return;
    busy = true;
    while (again && !signal.aborted) {
      again = false;
      try {
        const data = await getJson(path, { signal });
        if (!signal.aborted) setState({ path, data, error: null });
      } catch (error) {
        if (signal.aborted) return;
        setState((old) => ({ path, data: old.path === path && error.status === 0 ? old.data : null, error }));
      }
    }
    busy = false;
  };
}

/** Save the exported file of a session. The link cannot carry the key, so the page fetches it. */
export async function saveExport(session, texts) {
  const response = await request(`/inspect/api/export?session=${session}&texts=${texts ? 1 : 0}`);
  const url = URL.createObjectURL(await response.blob());
  const link = document.createElement("a");
  link.href = url;
  link.download = `singletree-${session}${texts ? "" : "-without-texts"}.html`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
