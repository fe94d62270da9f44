"""Records what llama.cpp itself makes of texts: ``python tests/prompts/make_golden_ids.py MODEL.gguf NAME``.

Writes ``golden/NAME.json``. Needs the xllamacpp wheel and the model; a test that reads the file needs only
the model's own file.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"

TEXTS = (
    "",
    " ",
    "Hello, world!",
    "Hello,  world!   Three   spaces and a trailing one ",
    "\n",
    "\n\n\n",
    " \n  \n\t\n \t \n",
    "    indented\n\tby tabs\n\t\t  and both\r\nwith a carriage return\r",
    "def fold(events: Iterable[Event]) -> Turn:\n    folding = Fold()\n    return folding.turn()  # 100%\n",
    '#include <stdio.h>\nint main(void) { printf("%d\\n", 0x7fff); return 0; }',
    "const f = async (x) => { await g(x?.y ?? `t${x}`); };  // => ;;",
    '{"name": "get_weather", "arguments": {"city": "Par\\u00eds", "days": 3.0, "n": [1, -2, 3e10]}}',
    "SELECT * FROM t WHERE a<>'b' AND c>=10--comment",
    "0 1 12 123 1234 12345 123456 1234567 3.14159 1,000,000 -42 0x1F 1e-9 2026-11-21T09:31:12Z",
    "I'm you're he's we'll they've I'd don't 'tis I'M YOU'RE IT'S WE'LL",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case dotted.path/and/slashes\\back",
    "日本語のテキストです。カタカナとひらがな。",
    "中文字符，没有空格。繁體中文也一樣！",
    "한국어 텍스트와 띄어쓰기",
    "Привет, мир! Ελληνικά. עברית עִם ניקוד. العربية مَعَ تشكيل.",
    "हिन्दी में पाठ, ไทยไม่มีช่องว่าง, தமிழ், বাংলা",
    "naïve café Zürich Łódź Ångström ﬁ ﬂ ß ẞ İ ı",
    "e\u0301 is not é; \u1e9b\u0323 is odd",
    "😀 😃👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇯🇵 ❤️",
    "①②③ ½ ¾ ² ³ Ⅷ ⅷ ٣٤٥ ४५६",
    "non\u00a0breaking\u2003em\u3000ideographic\u2028line\u200bzero\ufeffbom",
    "\u0000\u0001\u0007\u001b[31mred\u001b[0m\u007f\u0085",
    "a" * 100 + " " * 40 + "=" * 60 + "-" * 33 + "\n" * 9 + "ab" * 30,
    "!!! ??? ... --- *** ### $$$ %%% ^^^ &&& @@@ ~~~ ||| <<< >>> ((( ))) [[[ ]]] {{{ }}}",
    "“Quotes” ‘single’ «guillemets» – — … • · ¿ ¡ § ¶ † ‡ € £ ¥",
    "https://example.org/a/b?c=d&e=%20f#g user@example.org C:\\Users\\x ~/.config",
    '<html><body class="x">text &amp; more</body></html>',
    "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|im_end|><|endoftext|>",
    "before<|endoftext|> after <|endoftext|>\n<|endoftext|>",
    "<|im_start|",
    "<|im_start| >user<|im_end",
    "< |im_start|> <|im_startt|> <|IM_START|>",
    '<think>\nLet me think.\n</think>\n\n<tool_call>\n{"name": "f"}\n</tool_call>',
    "<repo_name>x<file_sep>y<issue_start>z<jupyter_code>",
    "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|><|repo_name|><|file_sep|>",
)


def main(model: Path, name: str) -> None:
    """Ask llama.cpp's own tokenizer endpoint, special tokens parsed, none added."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(model)
    parameters.n_ctx = 64
    server = xllamacpp.Server(parameters)
    records = []
    for text in TEXTS:
        body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
        request = urllib.request.Request(
            f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            records.append([text, json.load(answer)["tokens"]])
    lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    (GOLDEN / f"{name}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
