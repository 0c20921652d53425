"""Benchmarks of long texts and long chats, as tasks of lmms-eval."""
