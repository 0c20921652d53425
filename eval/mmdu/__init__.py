"""MMDU: long dialogues over many pictures, answered by a model and scored by a judge.

The benchmark is that of "MMDU: A Multi-Turn Multi-Image Dialog Understanding Benchmark" (Liu et
al., arXiv 2406.11833). benchmarks/notes/mmdu.md says how to run it.
"""
