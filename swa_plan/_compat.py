"""The original kernel's planner, kept exactly so that an engine can swap one import.

Specification: vLLM, ``vllm/models/step5/nvidia/ops/swa_decode.py`` (Apache-2.0). ``plan`` makes better plans; these two
are its yardstick and serve ``swa_decode_gated``.
"""

from __future__ import annotations


def swa_decode_splits(programs: int, num_sms: int, window: int) -> int:
    """Return how many chunks the original planner cuts a window into.

    Doubles from 1 while there are at most 4 splits so far, the programs stay within two waves and a chunk keeps at
    least 64 keys.

    Args:
        programs: (packed row, kv head) pairs of the step.
        num_sms: multiprocessors of the device.
        window: keys a row sees.
    """
    splits = 1
    while splits < 8 and programs * splits * 2 <= 2 * num_sms and window // (splits * 2) >= 64:
        splits *= 2
    return splits


def swa_decode_plan(
    tokens: int, kv_heads: int, group: int, query_len: int, num_sms: int, window: int
) -> tuple[int, int]:
    """Return the original planner's ``(pack, splits)``.

    Args:
        tokens: query rows of the step.
        kv_heads: heads of the cache.
        group: query heads a kv head.
        query_len: rows of each request.
        num_sms: multiprocessors of the device.
        window: keys a row sees.
    """
    packs = query_len > 1 and tokens * kv_heads >= 128 and query_len * group <= 64
    pack = query_len if packs else 1
    return pack, swa_decode_splits(tokens // pack * kv_heads, num_sms, window)
