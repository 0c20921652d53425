"""mmkv as a model of lmms-eval (eval/notes/lmms-eval.md)."""
