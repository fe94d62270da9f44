"""A model for a real SGLang: the scheduler, the cache and the sampler work, and only a script's next token is likely.

SGLang calls it with the tokens that are not in its cache alone. What stands before them is found by where the request
has its keys and values: a prefix that SGLang took for another one would play another script.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang.srt.model_executor.forward_context import get_req_to_token_pool
from sglang.srt.models import qwen2
from sglang.srt.runtime_context import get_server_args

from engines.scripted_turns import Playing, ScriptedTurns

_PLACES = 1 << 20  # more than a cache has on a CPU


class Qwen2ForCausalLM(qwen2.Qwen2ForCausalLM):  # type: ignore[misc]
    """Leave one token possible for each request; the name is that of the architecture that it stands for."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._turns = ScriptedTurns.of_environment(Path(get_server_args().model_path))
        self._placed: Any = None  # the token at each place of the cache
        self._playing: dict[int, tuple[Playing, Any]] = {}  # by request, with its prompt

    def forward(self, input_ids: Any, positions: Any, forward_batch: Any, *more: Any, **named: Any) -> Any:
        """Compute the logits, and exclude all tokens but one in each row."""
        output = super().forward(input_ids, positions, forward_batch, *more, **named)
        places = forward_batch.out_cache_loc
        if places is None or not len(places):
            return output
        if self._placed is None:
            self._placed = input_ids.new_zeros(_PLACES)
        self._placed[places] = input_ids
        pool = get_req_to_token_pool().req_to_token
        requests = zip(forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist(), strict=True)
        for row, (request, length) in enumerate(requests):
            token = self._next_token(request, self._placed[pool[request, :length].long()])
            output.next_token_logits[row] = float("-inf")
            output.next_token_logits[row, token] = 0.0
        return output

    def _next_token(self, request: int, ids: Any) -> int:
        playing, prompt = self._playing.get(request, (None, ids[:0]))
        size = len(prompt)
        played = tuple(ids[size:].tolist()) if playing and ids[:size].equal(prompt) else None
        again = playing is not None and playing.logged and not played
        if playing is None or again or played is None or played != playing.tokens[: len(played)]:
            playing, played = self._turns.begin(ids.tolist()), ()
            self._playing[request] = playing, ids
        return self._turns.next_token(playing, len(played))


EntryClass = Qwen2ForCausalLM
