"""Benchmarks of long texts and long chats, as tasks of lmms-eval (eval/notes/long-text.md)."""
