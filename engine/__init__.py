"""The mmkv engine: bounded-memory decoding over a paged, ragged KV cache."""
