"""A running SGLang server: what it serves, and how it schedules."""

from __future__ import annotations

import logging
from functools import partial

import msgspec

from singletree.errors import BadConfiguration
from singletree.remote.sglang.wire import SGLANG_BLINDNESS, SGLANG_WORDS, SglangWire, backend_loss
from singletree.remote.wire import GetPage, ServerOffer, ask_for_tokens, body_fields, find_model, read_page

_LOG = logging.getLogger(__name__)


class _ServerInfo(msgspec.Struct):
    version: str | None = None
    model_path: str | None = None
    max_running_requests: int | None = None
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    page_size: int | None = None
    max_total_num_tokens: int | None = None
    grammar_backend: str | None = None


class _ModelInfo(msgspec.Struct):
    has_image_understanding: bool = False


class SglangServer:
    """An SGLang server, 0.5 or newer; tested with 0.5.23. See ``Server``.

    Options for ``sglang.launch_server``:

    - ``--incremental-streaming-output``: without it each event repeats all tokens so far, so that a stream's size
      grows with the square of its length.
    - ``--enable-priority-scheduling``: without it priorities are not sent, because SGLang may refuse them. They are
      sent with the sign that the server's ``--schedule-low-priority-values-first`` needs.
    - ``--enable-multimodal`` for pictures, with models that SGLang serves without them by default.
    - ``--mm-preprocess-cache-size-mb 1024``: a picture that comes again is not decoded and resized again.
    - ``--grammar-backend xgrammar`` for forced calls: ``llguidance`` has JSON schemas, regexes and EBNF only.
    - ``--enable-session-radix-cache``: what no session refers to is evicted first. Sessions are named to a server
      whose ``/openapi.json`` has the field for it (0.5.23).
    - not ``--reasoning-parser``: with it SGLang applies constraints only after it considers the reasoning complete.
    """

    title = SGLANG_WORDS.title
    hint = (
        "start it with `python -m sglang.launch_server --model-path MODEL` (0.5 or newer), or correct the URL"
    )

    async def look_up(self, url: str, get: GetPage) -> ServerOffer:
        chosen, window = await find_model(url, get, self.title)
        if chosen.parent is not None:
            raise BadConfiguration(
                f"{chosen.id!r} at {url} is an adapter: {SGLANG_WORDS.path} is asked for the model itself; name "
                f"{chosen.parent!r}, or serve the adapter merged into its model"
            )
        info = await read_page(get, _ServerInfo, "/server_info", "/get_server_info") or _ServerInfo()
        if (loss := backend_loss(info.grammar_backend)) is not None:
            _LOG.warning("%s", loss)
        described = await read_page(get, _ModelInfo, "/model_info", "/get_model_info")
        blindness = None if described and described.has_image_understanding else SGLANG_BLINDNESS
        sign = (1 if info.schedule_low_priority_values_first else -1) * info.enable_priority_scheduling
        wire = SglangWire(blindness, sign, info.grammar_backend or "")
        wire.takes_sessions = "session_id" in await body_fields(get, wire.path)
        return ServerOffer(
            chosen.id,
            (wire,),
            window=window,
            slots=info.max_running_requests,
            details={"version": info.version, **_cache_size(info)},
            checkpoint=info.model_path or chosen.root,
            tokenize=partial(ask_for_tokens, chosen.id),
            # The prompts of retracted generations are read again, by the new weights.
            weights={
                "hold": ("/pause_generation", {"mode": "retract"}),
                "continue": ("/continue_generation", {}),
                "name": ("/update_weight_version", {"abort_all_requests": False}),
            },
        )


def _cache_size(info: _ServerInfo) -> dict[str, int]:
    """Return the size of a page of the KV cache and of the whole cache, in tokens, as far as they are known."""
    sizes = {"kv_block_size": info.page_size, "kv_cache_tokens": info.max_total_num_tokens}
    return {name: size for name, size in sizes.items() if size is not None and size > 0}
