"""``mmkv chat``: one-shot answers and the interactive conversation."""
