"""A running ``trtllm-serve``: what it serves."""

from __future__ import annotations

from singletree.engines.remote.model_list import choose_model, read_models, window_of
from singletree.engines.remote.wire import GetPage, ServerOffer
from singletree.engines.tensorrt_llm.wire import TensorRtWire


class TensorRtServer:
    """A TensorRT-LLM server, 1.0 or newer; by source, not run. See ``Server``.

    Its model list has no context window: that of the checkpoint is used, or ``--context-window``. It generates with
    ``guided_decoding_backend: xgrammar`` in ``--extra_llm_api_options`` if constraints shall have an effect.
    """

    title = "TensorRT-LLM"
    hint = "start it with `trtllm-serve MODEL` (1.0 or newer), or correct the URL"

    async def look_up(self, url: str, get: GetPage, model: str | None) -> ServerOffer:
        """Return what the server serves; see ``Server``."""
        models = await read_models(url, get, self.title)
        chosen = choose_model(url, self.title, models, model)
        return ServerOffer(
            chosen.id,
            (TensorRtWire(chosen.id),),
            window=window_of(chosen, models),
            checkpoint=chosen.root or chosen.id,
        )
