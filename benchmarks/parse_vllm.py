"""vLLM's own parsers on given pieces; run by ``parse.py`` in an environment that has vLLM, with orders on stdin.

Each piece is given as its chat serving gives a delta: the text, a token id, and the prompt's ids. Markers become
single tokens of a small vocabulary made here, as they are in the models' own.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from importlib import import_module
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

CHAT = "vllm.entrypoints.openai.chat_completion"
MARKERS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>", "</minimax:tool_call>",
    "｜DSML｜", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|turn>", "<turn|>",
    "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "<|python_tag|>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<seed:think>",
    "</seed:think>", "<seed:tool_call>", "</seed:tool_call>", "]<]minimax[>[", "<mm:think>", "</mm:think>",
)  # fmt: skip


def vocabulary() -> Any:
    """A byte-level tokenizer whose only other tokens are the markers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_tokens([AddedToken(m, normalized=False) for m in MARKERS])
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        raw.save(file.name)
        return import_module("transformers").PreTrainedTokenizerFast(tokenizer_file=file.name)


def measure(
    job: dict[str, Any], kind: str, cut: list[str], order: dict[str, Any], tokenizer: Any
) -> float | str:
    """CPU microseconds a piece; a string with ``>`` where the cap came first."""
    request = import_module(f"{CHAT}.protocol").ChatCompletionRequest(
        messages=[{"role": "user", "content": "hello"}],
        model="m",
        tools=[{"type": "function", "function": order["tool"]}],
        tool_choice="auto",
        stream=True,
    )
    thinks = kind == "reasoning"
    made = import_module("vllm.parser").ParserManager.get_parser(
        tool_parser_name=job["tools"], reasoning_parser_name=job["reasoning"], enable_auto_tools=True
    )
    parser = made(
        tokenizer, request.tools, chat_template_kwargs={"enable_thinking": thinks, "thinking": thinks}
    )
    request = parser.adjust_request(request)
    known = tokenizer.get_vocab()
    ids = [known.get(piece, 40) for piece in cut]
    prompt = [] if thinks else tokenizer.encode("<think></think>", add_special_tokens=False)
    begun = time.process_time()
    for i, piece in enumerate(cut):
        parser.parse_delta(
            delta_text=piece,
            delta_token_ids=[ids[i]],
            request=request,
            prompt_token_ids=prompt,
            finished=i == len(cut) - 1,
        )
        if not i % 64 and time.process_time() - begun > order["cap"]:
            return f">{(time.process_time() - begun) / (i + 1) * 1e6:.0f}"
    return (time.process_time() - begun) / len(cut) * 1e6


def main() -> None:
    """Do all jobs; the last line of the output is their figures."""
    order = json.load(sys.stdin)
    tokenizer = vocabulary()
    rows = []
    for job in order["jobs"]:
        found: dict[str, Any] = {"family": job["family"]}
        for kind, cut in job["streams"].items():
            try:
                found[kind] = measure(job, kind, cut, order, tokenizer)
            except Exception as error:  # one family that does not run here must not hide the others
                found[kind] = type(error).__name__
            if str(found[kind]).startswith(">"):
                break  # the longer ones would take longer still
        rows.append(found)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
