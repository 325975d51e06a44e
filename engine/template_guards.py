"""How a chat template's syntax tree is changed, so that all it makes goes through the sandbox's counts.

What jinja2 compiles to plain Python (loops, literals, comparisons, `~`, text) is given to filters whose names no
template can spell. Knows jinja2's nodes only.
"""

from __future__ import annotations

from typing import Any, Final

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

# Names that no template can spell, since they hold a space.
COUNTED: Final = "counted loop"
COMPARED: Final = "compared value"
JOINED: Final = "joined values"
MADE: Final = "made value"


def guard(template: nodes.Template) -> nodes.Template:
    """The template with filters around all that is not a call, a filter, a test or arithmetic already."""
    _Guards().visit(template)
    return template


def _filtered(node: Any, name: str, lineno: int) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=lineno)


class _Guards(NodeTransformer):
    # `generic_visit` changes what a node holds and returns the node.

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, COUNTED, node.lineno)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filtered(node.expr, COMPARED, node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), JOINED, node.lineno)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [
            nodes.Const(child.data, lineno=child.lineno) if isinstance(child, nodes.TemplateData) else child
            for child in node.nodes
        ]
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = _filtered(node.filter, MADE, node.lineno)
        return node

    def _literal(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else _filtered(node, MADE, node.lineno)

    visit_List = visit_Dict = visit_Tuple = _literal
