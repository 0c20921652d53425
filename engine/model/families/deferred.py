"""Load a checkpoint's vision tower when it is first needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


class DeferredModel:
    """A transformers model that is built when it is first asked for.

    Attributes:
        config: of the whole model.
        eos_token_ids: tokens that end a reply.
        vocab_size: rows of the embedding.
        note: a line on packed weights that were written or could not be when it was built.
    """

    def __init__(
        self,
        config: Any,
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
        build: Callable[[], tuple[Any, str | None]],
    ) -> None:
        self.config, self.eos_token_ids, self.vocab_size = config, eos_token_ids, vocab_size
        self._build, self._built = build, None
        self.note: str | None = None
        self._lock = threading.Lock()

    @property
    def built(self) -> bool:
        """Return whether it has been built."""
        return self._built is not None

    def get(self) -> Any:
        """Return the model. Raises ModelError; a later call then tries again."""
        with self._lock:
            if self._built is None:
                # Its weights are ordinary ones, also when the first picture comes while decoding.
                with torch.inference_mode(False):
                    self._built, self.note = self._build()
            return self._built
