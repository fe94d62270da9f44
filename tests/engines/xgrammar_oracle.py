"""Asks XGrammar itself which texts a structural tag takes. Run by the Python of the vLLM that `make engines` installs.

Standard input: JSON, a list of [structural tag, [texts]]; standard output: JSON, for each tag the list of verdicts, or
XGrammar's complaint about the tag.
"""

import json
import sys
from importlib import import_module


def _verdicts(tag: object, texts: list[str]) -> list[bool] | str:
    grammars = import_module("xgrammar").Grammar
    accepts = import_module("xgrammar.testing")._is_grammar_accept_string
    try:
        grammar = grammars.from_structural_tag(json.dumps(tag))
    except Exception as error:
        return str(error)
    return [accepts(grammar, text) for text in texts]


if __name__ == "__main__":
    json.dump([_verdicts(tag, texts) for tag, texts in json.load(sys.stdin)], sys.stdout)
