"""What expressions of Prometheus ask for, as a parser of its language reads them.

The parser refuses what Prometheus would: unknown functions, wrong kinds of arguments, brackets that
are left open.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import promql_parser


@dataclass
class Asked:
    """Names in an expression."""

    metrics: set[str] = field(default_factory=set)
    labels: set[str] = field(default_factory=set)
    """Those that are matched, grouped by, or joined on."""
    counted: set[str] = field(default_factory=set)
    """Metrics whose rate is asked for."""


def asked(expression: str) -> Asked:
    """Names in an expression.

    Raises:
        ValueError: Prometheus would not take it.

    """
    found = Asked()

    def visit(node: promql_parser.Expr) -> bool:
        if isinstance(node, promql_parser.VectorSelector | promql_parser.MatrixSelector):
            selector = getattr(node, "vector_selector", node)
            found.metrics.add(selector.name)
            found.labels.update(one.name for one in selector.matchers.matchers)
        elif isinstance(node, promql_parser.Call) and node.func.name in {"rate", "increase"}:
            found.counted.update(one.vector_selector.name for one in node.args)
        found.labels.update(_grouping(node))
        return True

    promql_parser.walk(promql_parser.parse(expression), pre_visit=visit)
    return found


def _grouping(node: promql_parser.Expr) -> Iterator[str]:
    """Labels that an aggregation keeps, or by which two sides are joined."""
    modifier = getattr(node, "modifier", None)
    matching = getattr(modifier, "matching", modifier)
    yield from getattr(matching, "labels", ())
