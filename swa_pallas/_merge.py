"""The public ``merge_states``: partial attentions over disjoint keys, merged by their log-sum-exps."""

from __future__ import annotations

from typing import Any

import jax

from swa_pallas import _run
from swa_pallas._device import check_backend
from swa_pallas._validate import as_arrays, check_array, check_head_options, check_out_dtype
from swa_plan._checks import check_head_dim
from swa_plan._problem import QUERY_DTYPES


def merge_states(
    outs: jax.Array,
    lses: jax.Array,
    *,
    sinks: jax.Array | None = None,
    gate: jax.Array | None = None,
    out_dtype: Any = None,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Merge partial attentions (shared prefixes, cascades, context shards) into one.

    ``out = sum_i exp(lse_i - lse) out_i`` with ``lse = log(sum_i exp(lse_i) + exp(sink))``. Partials are computed
    without sinks and gate, best with ``out_dtype=jnp.float32``; the merge adds both once. ``lse_i = -inf`` is the
    identity: such a part adds nothing, whatever its output holds. A row without any keys is zero with an LSE of
    ``-inf``, sinks or not.

    Args:
        outs: ``[parts, tokens, heads, v_dim]``, bf16, fp16 or fp32.
        lses: ``[parts, tokens, heads]``, fp32, natural logarithms.
        sinks: ``[heads]`` extra logits in the denominator.
        gate: ``[tokens, heads]`` logits of a sigmoid gate.
        out_dtype: output dtype; None means that of ``outs``.
        backend: as in ``swa_decode``.

    Returns:
        ``(out, lse)``: ``[tokens, heads, v_dim]`` and fp32 ``[tokens, heads]``.

    Raises:
        TypeError: kinds or dtypes.
        ValueError: shapes, or (while lowering) a backend on a platform that it does not serve.
        NotImplementedError: gradients or ``vmap``.
        RuntimeError: the backend needs a part of JAX that is gone.
    """
    check_backend(backend)
    check_array("outs", outs, QUERY_DTYPES)
    if outs.ndim != 4 or not outs.shape[0]:
        raise ValueError(f"outs must have shape [parts >= 1, tokens, heads, v_dim], got {list(outs.shape)}")
    check_head_dim("v_dim", int(outs.shape[3]))
    check_array("lses", lses, ("float32",), tuple(outs.shape[:3]))
    check_head_options(outs.shape[1], outs.shape[2], gate, sinks)
    arrays = as_arrays({"outs": outs, "lses": lses, "sinks": sinks, "gate": gate})
    return _run.merge(**arrays, out_dtype=check_out_dtype(out_dtype, outs.dtype), backend=backend)
