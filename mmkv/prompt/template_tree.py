"""What is changed in a chat template's syntax tree before it is compiled."""

from __future__ import annotations

from typing import Any

from jinja2 import nodes

# The filters that are put in; those of mmkv.prompt.sandbox.
JOIN, EACH, KEEP = "mmkv_join", "mmkv_each", "mmkv_keep"
AT, END = "mmkv_at", "mmkv_end"
_OPENING = "add_generation_prompt"


def mark_end(tree: nodes.Template) -> None:
    """Have the length noted before the opening of a reply, if that is the template's last word."""
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, nodes.If) or last.elif_ or last.else_:
        return
    names = [name for name in tree.find_all(nodes.Name) if name.name == _OPENING]
    hidden = any(macro.name == _OPENING for macro in tree.find_all(nodes.Macro))
    if len(names) == 1 and names[0] is last.test and not hidden:
        # Of a name: what is constant is computed when the template is compiled.
        noted = nodes.Filter(
            nodes.Name(_OPENING, "load"), END, [], [], None, None, lineno=last.lineno
        )
        tree.body.insert(-1, nodes.Output([noted], lineno=last.lineno))


def guard(tree: nodes.Template) -> None:
    """Lead loops, ``~`` and computed lists through filters that look at them."""

    def through(name: str, value: Any) -> nodes.Filter:
        return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)

    def inner(node: nodes.Node) -> None:
        for field, value in node.iter_fields():
            if isinstance(value, list):
                setattr(node, field, [one(v) if isinstance(v, nodes.Node) else v for v in value])
            elif isinstance(value, nodes.Node):
                setattr(node, field, one(value))

    def one(node: nodes.Node) -> nodes.Node:
        inner(node)
        if isinstance(node, nodes.For):
            node.iter = through(EACH, node.iter)
            if isinstance(node.target, nodes.Name):  # prints nothing
                named = nodes.Name(node.target.name, "load", lineno=node.lineno)
                node.body.insert(0, nodes.Output([through(AT, named)], lineno=node.lineno))
        elif isinstance(node, nodes.Concat):
            return through(JOIN, nodes.List(node.nodes, lineno=node.lineno))
        elif isinstance(node, (nodes.List, nodes.Dict, nodes.Tuple)):
            # A tuple of names can be what is assigned to.
            stored = isinstance(node, nodes.Tuple) and node.ctx != "load"
            if not stored and node.find(nodes.Name) is not None:
                return through(KEEP, node)
        return node

    inner(tree)
    tree.set_environment(tree.environment)  # type: ignore[arg-type]
