"""Names of the methods of the decode benchmark, in its results and on its command line.

Nothing is imported: the peers' own environments read this too.
"""

OWN, FULL, EAGER = "mmkv graph, evicting", "mmkv graph, full cache", "mmkv eager, evicting"

# The peers: transformers with a dynamic cache, a static cache, and continuous batching.
DYNAMIC = "transformers"
STATIC = "transformers static+compile"
BATCHING = "transformers continuous batching"
KVPRESS, TRIMKV = "kvpress", "trimkv"
BOUNDED = (KVPRESS, TRIMKV)  # evict as we do: their memory does not grow with the context
