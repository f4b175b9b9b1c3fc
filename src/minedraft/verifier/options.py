"""What a single request may ask of MineDraft, in vLLM's ``extra_args`` (``vllm_xargs`` by HTTP)."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from minedraft.config import ConfigError
from minedraft.protocol import MAX_DRAFT_TOKENS

PREFIX = "minedraft_"


class RequestOptions(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename=lambda name: PREFIX + name
):
    """Names carry the prefix ``minedraft_`` in a request."""

    draft: Annotated[
        bool, msgspec.Meta(description="0: decode this request without drafts (default: 1)")
    ] = True

    max_draft_tokens: Annotated[
        int,
        msgspec.Meta(
            description="draft tokens for each verification of this request, at most",
            ge=0,
            le=MAX_DRAFT_TOKENS,
        ),
    ] = MAX_DRAFT_TOKENS

    draft_seeded: Annotated[
        bool | None,
        msgspec.Meta(
            description="1: draft although the request has a seed and temperature > 0; 0: do not "
            "(default: the server's draft_seeded)"
        ),
    ] = None

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None) -> "RequestOptions":
        """The options among a request's extra arguments; others are not ours. Raises ConfigError.

        Numbers and booleans may be written as text, as HTTP clients do.
        """
        ours = {
            str(name): value
            for name, value in (extra_args or {}).items()
            if str(name).startswith(PREFIX)
        }
        if not ours:
            return DEFAULT
        try:
            return msgspec.convert(ours, cls, strict=False)
        except msgspec.ValidationError as error:
            names = ", ".join(cls.__struct_encode_fields__)
            raise ConfigError(f"request options: {error}; the options are {names}") from error


DEFAULT = RequestOptions()
