"""mmkv as a model of lmms-eval (benchmarks/notes/lmms-eval.md)."""
