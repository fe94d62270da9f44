// Hooks that watch the screen and the clock.
import { useEffect, useReducer, useState } from "preact/hooks";

/** Whether a media query holds. */
export function useMedia(query) {
  const [holds, setHolds] = useState(() => matchMedia(query).matches);
  useEffect(() => {
    const list = matchMedia(query);
    const changed = () => setHolds(list.matches);
    list.addEventListener("change", changed);
    changed();
    return () => list.removeEventListener("change", changed);
  }, [query]);
  return holds;
}

/** Render again every `ms` milliseconds; 0 for never. */
export function useTick(ms) {
  const [, tick] = useReducer((n) => n + 1, 0);
  useEffect(() => {
    if (!ms) return undefined;
    const timer = setInterval(tick, ms);
    return () => clearInterval(timer);
  }, [ms]);
}
