"""Override YAMLs for lmms-eval; eval.lmms.tasks fills in the paths."""
