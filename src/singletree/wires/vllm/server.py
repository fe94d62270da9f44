"""A running ``vllm serve``: what it serves, and by which of its endpoints token ids go in and out.

Two endpoints take and stream token ids. ``/inference/v1/generate`` exists only with ``--enable-scale-out``; it costs
vLLM's API process about a tenth less for each token (150 against 167 µs, 8 streams) and takes pictures.
``/v1/completions`` is always there. Chat completions render and parse by themselves.
"""

from __future__ import annotations

import re
from functools import partial

import msgspec

from singletree.engines.remote.wire import GetPage, ServerOffer, ask_for_tokens, find_model, read_page
from singletree.errors import BadConfiguration
from singletree.wires.vllm.generate_wire import GenerateWire
from singletree.wires.vllm.wire import CompletionsWire


class _Version(msgspec.Struct):
    version: str


class VllmServer:
    """A vLLM server, 0.11 or newer; tested with 0.32. See ``Server``.

    Options for ``vllm serve``:

    - ``--enable-scale-out`` for ``/inference/v1/generate``.
    - ``--enable-prompt-tokens-details``: without it vLLM does not report how much of a prompt was cached, and
      ``cached_tokens`` stays None.
    - ``--structured-outputs-config '{"backend": "xgrammar"}'`` for structural tags, or ``"guidance"`` for
      Lark grammars that name special tokens, and ``constraints=("lark",)`` for the engine. With ``auto``, vLLM
      validates each constraint against the backend that suits it, but then runs all of them on the backend of the
      first one (0.32, ``v1/structured_output/__init__.py``): a constraint that suits only another backend fails with
      EngineFailed instead of being refused with InvalidRequest.
    - not ``--reasoning-parser``: with it vLLM applies constraints only after it considers the reasoning complete,
      or ``"enable_in_reasoning": true`` in ``--structured-outputs-config`` beside it.
    - ``--scheduling-policy priority`` if priorities shall have an effect; otherwise vLLM accepts and ignores them.

    ``priority`` is passed to vLLM: a lower number runs earlier, 0 is the default. vLLM refuses more log-probabilities
    than ``--max-logprobs`` (20).
    """

    title = CompletionsWire.words.title
    hint = "start it with `vllm serve MODEL` (0.11 or newer), or correct the URL"

    async def look_up(self, url: str, get: GetPage, model: str | None) -> ServerOffer:
        chosen, window = await find_model(url, get, self.title, model)
        if window is None:
            raise BadConfiguration(
                f"{url} reports no max_model_len for {chosen.id!r}: it is not a vLLM server; correct the URL"
            )
        version = await read_page(get, _Version, "/version")
        generate, completions = GenerateWire(chosen.id), CompletionsWire(chosen.id)
        lost = (
            f"vLLM at {url} does not offer {generate.path}, so {completions.path} is used: it takes no pictures and "
            "costs vLLM's API process about a tenth more for each token; start vLLM with --enable-scale-out"
        )
        return ServerOffer(
            chosen.id,
            (generate, completions),
            window=window,
            details={"version": version and version.version, **await _cache_size(get)},
            checkpoint=chosen.root,
            losses={generate.path: lost},
            tokenize=partial(ask_for_tokens, chosen.id),
            # It has these routes with VLLM_SERVER_DEV_MODE=1 in its environment.
            weights={
                "hold": ("/pause?mode=keep", {}),
                "continue": ("/resume", {}),
                "name": ("/update_weight_version", {}),
            },
        )


_CACHE = re.compile(rb"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_CACHE_FIELD = re.compile(rb'(block_size|num_gpu_blocks)="(\d+)"')


async def _cache_size(get: GetPage) -> dict[str, int]:
    """Return the size of a block of the KV cache and of the whole cache, in tokens; nothing where they are hidden."""
    status, body = await get("/metrics")
    if status != 200 or (line := _CACHE.search(body)) is None:
        return {}
    found = {name: int(value) for name, value in _CACHE_FIELD.findall(line[1])}
    size, blocks = found.get(b"block_size", 0), found.get(b"num_gpu_blocks", 0)
    return {"kv_block_size": size, "kv_cache_tokens": size * blocks} if size and blocks else {}
