"""Override YAMLs for lmms-eval; eval.lmms.tasks fills in where things lie (docs/lmms-eval.md)."""
