"""The flags of commands that read a model without serving it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from singletree.server.models.config import Config


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """What replaces the chat template and the family that a model comes with."""

    chat_template: Annotated[Path | None, Parameter(name=["--chat-template", "--custom-jinja-template"])] = (
        None
    )
    """Jinja file to use instead of the model's own chat template."""

    tool_call_parser: Annotated[
        str | None, Parameter(name=["--tool-call-parser", "--dyn-tool-call-parser"])
    ] = None
    """Family of the model's tool calls."""

    reasoning_parser: Annotated[
        str | None, Parameter(name=["--reasoning-parser", "--dyn-reasoning-parser"])
    ] = None
    """Family of the model's reasoning."""

    def config(self, model: str | None, **others: Any) -> Config:
        """Return the configuration for ``model`` (None for the default one), with further fields ``others``."""
        from singletree.server.models import byte_model
        from singletree.server.models.config import Config

        scripted = model == byte_model.NAME
        return Config(
            model=None if scripted else model,
            engine="scripted" if scripted else "llamacpp",
            chat_template=self.chat_template,
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
            **others,
        )
