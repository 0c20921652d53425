"""``python -m mmkv``: the same as the ``mmkv`` command."""

from mmkv.cli.entry import entry

if __name__ == "__main__":
    entry()
