"""`ResolvedConfig`: what "auto" became on this machine and for this model. The resolver fills it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """Values found from hardware, model and memory, kept apart from what the user wrote (`EngineConfig`).

    Admission, the model listing and the workers all read these, so that there is one truth of each (C7).
    """

    #: compute dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``
    dtype: str
    #: dtype of the KV cache
    kv_dtype: str
    #: device type: ``"cpu"`` or ``"cuda"``
    device: str
    #: most tokens of a request, prompt and output together
    max_model_len: int
    #: tokens a KV block
    block_size: int
    #: most tokens a step
    max_num_batched_tokens: int
    #: blocks of the KV pool, the null block included; None until memory has been measured
    num_kv_blocks: int | None = None
    #: a sentence for each field that was not written by the user: where its value comes from
    why: Mapping[str, str] = field(default_factory=dict)
