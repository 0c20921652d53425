"""Random and malformed inputs for every door of mmkv, all made from a seed."""
