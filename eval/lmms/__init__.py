"""mmkv as a model of lmms-eval (docs/how-to/lmms-eval.md)."""
