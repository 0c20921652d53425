"""mmkv as a model of lmms-eval (docs/lmms-eval.md)."""
