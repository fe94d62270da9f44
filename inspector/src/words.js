// What the page calls things. Colours are classes of style.css; each has a pattern or a word beside it.

/** Phases of a turn, in time order. */
export const PHASES = {
  prepare: { label: "prepare", says: "render and tokenize the prompt" },
  queue: { label: "queue", says: "wait for a place on the engine" },
  prefill: { label: "prefill", says: "the engine reads the prompt up to the first token" },
  reasoning: { label: "reasoning", says: "the model writes reasoning" },
  text: { label: "text", says: "the model writes text" },
  call: { label: "tool call", says: "the model writes a tool call, from its first token to its dispatch" },
  markup: { label: "markers", says: "the model writes markers of its format" },
  more: { label: "more", says: "further parts, which are not shown one by one" },
  tool: { label: "tool at the harness", says: "from the dispatch of a call to the arrival of its result" },
  gap: { label: "gap", says: "from the end of a turn to the next one, without a tool" },
};

/** States of prompt tokens. The first whose test holds names a span. */
export const PROMPT_STATES = {
  picture: { label: "picture", says: "tokens that stand for a picture" },
  rerendered: { label: "re-rendered", says: "was in the last prompt; is read again because the prompt broke before it" },
  new: { label: "new", says: "was not in the last prompt" },
  replayed: { label: "replayed", says: "in place, with the tokens that the model generated" },
  kept: { label: "in place", says: "in place since the last prompt" },
};
export const CANONICALIZED = { label: "canonicalized", says: "a rule made text stable that the harness changes" };

export function promptState(span) {
  if (span.from === "picture") return "picture";
  if (span.kind === "kept") return span.from === "model" ? "replayed" : "kept";
  return span.kind;
}

export const LANES = {
  main: { label: "main", says: "the main conversation" },
  agent: { label: "sub-agent", says: "the conversation of a sub-agent" },
  fork: { label: "fork", says: "goes on from an earlier turn, while the lane it left goes on too" },
  rewind: { label: "rewind", says: "goes back to an earlier turn; what came behind it was given up" },
  compaction: { label: "compaction", says: "the conversation starts again from a summary" },
  side: { label: "side", says: "a question beside the conversation: a title, a search" },
  conversation: { label: "conversation", says: "another conversation under the same name" },
};

export const COURSES = {
  first: { mark: "○", label: "first", says: "begins a conversation" },
  appended: { mark: "●", label: "appended", says: "continues the last prompt and turn without a break" },
  back: { mark: "↩", label: "back", says: "continues an earlier turn; this is not a break" },
  broken: { mark: "✕", label: "broken", says: "does not contain all of the last prompt and turn" },
};

export const VERDICTS = {
  first: { mark: "○", label: "first prompt", tone: "plain" },
  hit: { mark: "✓", label: "cache hit", tone: "good" },
  prompt_broke: { mark: "✕", label: "the prompt broke", tone: "bad" },
  engine_evicted: { mark: "▽", label: "the engine evicted", tone: "warn" },
  engine_restarted: { mark: "▽", label: "the engine began anew", tone: "warn" },
  other_worker: { mark: "⇄", label: "another worker", tone: "warn" },
  not_reported: { mark: "?", label: "not reported", tone: "plain" },
  running: { mark: "…", label: "running", tone: "plain" },
};

export const STATUSES = {
  running: "running",
  done: "done",
  cancelled: "cancelled by the client",
  superseded: "sent again by the client",
  error: "error",
};

export const MADE_BY = {
  message: "a message that the harness sent differently",
  tool: "the list of tools",
  template: "the chat template",
  settings: "a setting of the request",
  answer: "the generated turn, which came back differently",
};

export const PROTOCOLS = { messages: "Messages", chat: "Chat Completions", responses: "Responses" };

export const NO_TEXTS =
  "Texts are not kept. Start the server with --inspect --inspect-content to see what prompts and answers say.";
export const NO_DETAILS = "The details of this turn have left the server's memory. Its counts and times remain.";

/** The keys, by where they work, for the help. */
export const KEYS = [
  ["Everywhere", [
    ["?", "this help"],
    ["j  k", "next, previous row (or arrow keys)"],
    ["Enter", "open the chosen row"],
    ["Esc", "close, or one level up"],
    ["x", "mark a turn or session to compare; x on another one compares them"],
    ["g", "all sessions"],
    ["t", "light, dark or the system's colours"],
  ]],
  ["Sessions", [
    ["/", "search"],
    ["←  →", "fold, unfold sub-agents"],
  ]],
  ["One session", [
    ["p", "the prompt of the chosen turn"],
    ["b", "next turn whose prompt broke"],
    ["Home  End", "first, last turn"],
    ["e", "export the session"],
  ]],
  ["One turn or prompt", [
    ["[  ]", "turn before, turn after"],
    ["p", "from the turn to its prompt, and back"],
    ["d", "compare with the turn before"],
    ["b", "to the place where the prompt broke"],
    ["r", "raw request beside the prompt"],
    ["s", "shade tokens by log-probability"],
  ]],
];
