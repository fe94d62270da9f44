// The templates of the page: htm on preact. Text in them becomes text nodes, never markup.
import { h } from "preact";
import htm from "htm";

export const html = htm.bind(h);
