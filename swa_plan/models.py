"""Attention shapes of published sliding-window models, for replays, benchmarks and tests.

Only what decode attention sees: heads, head sizes, window, gate, sinks, softcap. ``layers`` counts the windowed layers'
share of a model only where a replay needs one number; a replay decodes one layer unless told otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ModelShape:
    """One model's windowed attention layer.

    Attributes:
        name: short name, as the command line takes it.
        heads: query heads before tensor parallelism.
        kv_heads: kv heads before tensor parallelism.
        k_dim: key head size.
        v_dim: value head size.
        window: keys a row sees, its own included.
        query_len: rows of a verify step (1 + drafts), or 1.
        gate: whether each head has a sigmoid gate.
        sinks: whether each head has a sink logit.
        softcap: cap of the logits, or None.
    """

    name: str
    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    window: int
    query_len: int = 1
    gate: bool = False
    sinks: bool = False
    softcap: float | None = None

    def shard(self, tp: int) -> ModelShape:
        """Return the shape that one of ``tp`` tensor-parallel ranks sees; kv heads are replicated beyond their number.

        Raises:
            ValueError: the heads do not divide.
        """
        if tp < 1 or self.heads % tp or (self.kv_heads % tp and tp % self.kv_heads):
            raise ValueError(
                f"tp must divide heads={self.heads} and divide or be a multiple of kv_heads={self.kv_heads}, got {tp}"
            )
        return replace(self, heads=self.heads // tp, kv_heads=max(1, self.kv_heads // tp))


MODELS = {
    model.name: model
    for model in (
        ModelShape("step5", 64, 4, 192, 192, 512, query_len=4, gate=True),
        ModelShape("step3.7", 96, 8, 128, 128, 512, gate=True),
        ModelShape("mimo-v2", 64, 8, 192, 128, 128, sinks=True),
        ModelShape("gpt-oss", 64, 8, 64, 64, 128, sinks=True),
        ModelShape("gemma2", 16, 8, 256, 256, 4096, softcap=50.0),
        ModelShape("gemma3", 16, 8, 256, 256, 1024),
        ModelShape("mistral", 32, 8, 128, 128, 4096),
    )
}
"""The shapes by name."""
