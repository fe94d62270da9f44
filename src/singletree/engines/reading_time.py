"""Estimates how long an engine will take to read a prompt, from the measured speed, for a line in the log.

On a CPU the first prompt of a session, with the instructions and tools of a harness, takes minutes.
"""

from __future__ import annotations

MIN_REPORTED_SECONDS = 5.0
"""Shorter waits are not logged."""
REPORT_SECONDS = 30.0
"""After this time the rest of the same prompt is logged again."""
_FEWEST_TOKENS = 32
"""A measurement of fewer tokens is too inexact."""


class PrefillSpeed:
    """The last measured speed at which an engine reads prompts.

    Attributes:
        tokens_per_second: None until enough tokens of a prompt have been read.
    """

    __slots__ = ("tokens_per_second",)

    def __init__(self) -> None:
        self.tokens_per_second: float | None = None

    def record(self, tokens: int, seconds: float) -> None:
        """Record that the engine read ``tokens`` uncached tokens in ``seconds``."""
        if tokens >= _FEWEST_TOKENS and seconds > 0:
            self.tokens_per_second = tokens / seconds


class PrefillEstimator:
    """Estimate the remaining time for one prompt.

    Args:
        speed: the engine's speed; updated with what is measured here.
    """

    __slots__ = ("_next_report", "_speed")

    def __init__(self, speed: PrefillSpeed) -> None:
        self._speed = speed
        self._next_report = 0.0

    def estimate(self, total: int, cached: int, read: int, seconds: float) -> str | None:
        """Record the progress of this prompt, and estimate the rest.

        Args:
            total: tokens of the prompt.
            cached: how many of them were in the prefix cache.
            read: how many have been read so far, the cached ones included.
            seconds: time since reading began.

        Returns:
            A sentence for the log: when the speed is known and the remaining time is at least
            ``MIN_REPORTED_SECONDS``, and then every ``REPORT_SECONDS``. Otherwise None.
        """
        self._speed.record(read - cached, seconds)
        speed, left = self._speed.tokens_per_second, total - read
        if seconds < self._next_report or speed is None or left / speed < MIN_REPORTED_SECONDS:
            return None
        self._next_report = seconds + REPORT_SECONDS
        return (
            f"{left} of {total} prompt tokens have to be read: about {left / speed:.0f} s until the first word, "
            f"at the measured {speed:.0f} tokens/s"
        )
