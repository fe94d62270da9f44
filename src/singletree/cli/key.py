"""``singletree key``: make an API key for the file of ``--key-file``."""

from __future__ import annotations

import secrets
import sys

from singletree.key_files.key_file import check_name
from singletree.server.settings.api_keys import digest_of


def key(name: str) -> None:
    """Make an API key: print it to standard error, here only, and its entry for --key-file to standard output.

    Parameters
    ----------
    name
        Whose key it is: what the server remembers belongs to this name.
    """
    check_name(name)
    made = f"st-{secrets.token_urlsafe(32)}"
    print(f"key        {made}", file=sys.stderr)
    print(f'["{name}"]\nsha256 = ["{digest_of(made).hex()}"]\n')
