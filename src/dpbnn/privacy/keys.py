"""Secret keys that move forward only: a later key does not give an earlier one back."""

from __future__ import annotations

from hashlib import blake2b

__all__ = ["ratchet"]


def ratchet(key: bytes, times: int = 1) -> bytes:
    """Return the key of the next use, K' = BLAKE2b(key = K; "ratchet"), or of a later one.

    **Guarantee.** BLAKE2b is one-way, so whoever learns K' cannot compute K, nor what was drawn
    from it.

    Args:
        key: 16 to 64 bytes.
        times: how many uses to move on.
    """
    for _ in range(times):
        key = blake2b(b"ratchet", key=key, digest_size=len(key), person=b"dpbnn keys").digest()
    return key
