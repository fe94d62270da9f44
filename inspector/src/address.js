// Addresses: everything after # in the page's URL. They can be shared.
import { signal } from "@preact/signals";

export const address = signal(read());

function read() {
  const [path, query = ""] = location.hash.slice(1).split("?");
  const parts = path.split("/").filter(Boolean);
  return { path: `/${parts.join("/")}`, parts, query: new URLSearchParams(query) };
}

window.addEventListener("hashchange", () => (address.value = read()));

export const sessionAddress = (session) => `#/sessions/${session}`;
export const turnAddress = (session, turn) => `#/sessions/${session}/turns/${turn}`;
export const promptAddress = (session, turn) => `${turnAddress(session, turn)}/prompt`;
export const sidesAddress = (a, b) => `#/sides?a=${a}&b=${b}`;
export const differenceAddress = (a, b) => `#/difference?a=${a}&b=${b}`;

export function go(to) {
  location.hash = to;
}

/** Change the query of the present address without a new entry in the history. */
export function setQuery(changes) {
  const { path, query } = address.value;
  const next = new URLSearchParams(query);
  for (const [name, value] of Object.entries(changes)) {
    if (value) next.set(name, value);
    else next.delete(name);
  }
  const text = next.toString();
  history.replaceState(null, "", `#${path}${text ? `?${text}` : ""}`);
  address.value = read();
}

/** Take the key out of `#key=KEY&to=PLACE`, the first address that `singletree inspect` opens. */
export function takeKey() {
  if (!location.hash.startsWith("#key=")) return null;
  const given = new URLSearchParams(location.hash.slice(1));
  history.replaceState(null, "", `#${given.get("to") ?? "/sessions"}`);
  address.value = read();
  return given.get("key");
}
