"""An OpenAI-compatible server; needs the extra ``serve``."""
