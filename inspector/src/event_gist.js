// What an event adds, in one line: its text, or else its data.

/** Where the three protocols put the text of a delta. */
const PLACES = [
  ["delta", "text"],
  ["delta", "thinking"],
  ["delta", "partial_json"],
  ["choices", 0, "delta", "content"],
  ["choices", 0, "delta", "reasoning_content"],
  ["choices", 0, "delta", "reasoning"],
  ["choices", 0, "delta", "tool_calls", 0, "function", "arguments"],
  ["choices", 0, "delta", "tool_calls", 0, "function", "name"],
  ["content_block", "name"],
  ["content_block", "type"],
  ["choices", 0, "finish_reason"],
  ["delta", "stop_reason"],
  ["delta"],
  ["item", "name"],
  ["item", "type"],
];

export function gist(data) {
  let value;
  try {
    value = JSON.parse(data);
  } catch {
    return data;
  }
  for (const place of PLACES) {
    const found = place.reduce((inner, name) => inner?.[name], value);
    if (typeof found === "string" && found) return JSON.stringify(found).slice(1, -1);
  }
  return data;
}
