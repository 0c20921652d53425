"""``python -m mmkv``: the same as the ``mmkv`` command."""

from mmkv.cli.app import main

if __name__ == "__main__":
    main()
