"""Settings of fine-tuning on all labels."""

from __future__ import annotations

from ..semisup.config import TuningConfig

__all__ = ["FinetuneConfig"]


class FinetuneConfig(TuningConfig):
    """Fine-tune the whole network on all labels (SwAV's figure 4, "finetuned").

    The paper doesn't say how figure 4 was trained: these are A.4's settings for the larger share, 20 epochs of
    batches of 256 (``small``: 32), rates 0.01 and 0.2, times 0.2 at 12 and 16, no decay.
    """

    def settled(self, labelled: int) -> FinetuneConfig:
        """The same with the protocol's values for so many images."""
        return FinetuneConfig.model_validate(self._filled(labelled, 1.0))
