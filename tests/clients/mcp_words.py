"""An MCP server over standard input and output with one tool, which turns a word round."""

from __future__ import annotations

import json
import sys
from typing import Any

TOOL = {
    "name": "reverse",
    "description": "Turns a word round.",
    "inputSchema": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
}


def answer(method: str, output: dict[str, Any]) -> dict[str, Any]:
    """What a request is answered with."""
    if method == "initialize":
        version = output.get("protocolVersion", "2025-06-18")
        server = {"name": "words", "version": "1"}
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": output["arguments"]["word"][::-1]}]}
    return {}


def main() -> None:
    """Answers until the input ends."""
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message:
            result = answer(message["method"], message.get("params") or {})
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)


if __name__ == "__main__":
    main()
