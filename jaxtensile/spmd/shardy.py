"""The division of a program's values among devices, by Shardy's propagation and without a compile.

XLA runs the same passes on a module that it reads back from HLO. HLO orders operations differently than JAX, and the
order decides between two conflicting rules. So the module goes through HLO here too.

Invariant: every result is keyed by the marks in the module's own locations (`spmd.marked`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from jaxtensile import _compat
from jaxtensile.spmd.marked import mark_of

Parts = tuple[int, ...]
"""Into how many parts each dimension of an array is divided."""
Typed = tuple[tuple[int, ...], Parts]
"""The shape of a whole array, and its parts."""

_PROPAGATION: Final = "builtin.module(inline,sdy-propagation-pipeline)"
_RESHARDS: Final = "builtin.module(func.func(sdy-insert-explicit-reshards{enable-full-version=true}))"
_IN_HLO: Final = "xla.sdy.sharding"
"""Where an operation keeps its sharding in HLO, below ``mhlo.frontend_attributes``."""
_CONSTRAINTS: Final = frozenset({"Sharding", "xla.sdy.FuncResultSharding", "local_xla.sdy.FuncResultSharding"})
"""Calls in HLO that stand for a sharding constraint."""
_MANUAL: Final = "sdy.manual_computation"
_SUM: Final = "sdy.all_reduce"
_KEYS: Final = ("sdy.sharding", "sharding", "out_sharding", "out_shardings")


@dataclass(frozen=True, slots=True)
class Reshard:
    """An operand of this whole shape that is divided into ``before`` and read divided into ``after``. ``readers``:
    their marks."""

    shape: tuple[int, ...]
    before: Parts
    after: Parts
    readers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    """A result before the devices' partial sums are added up over ``axes``: its whole shape, and its parts."""

    shape: tuple[int, ...]
    parts: Parts
    axes: str


@dataclass(frozen=True)
class Propagated:
    """``arguments``, ``outputs``: of the program. ``results``: by mark, the results of each operation under it."""

    arguments: tuple[Parts, ...]
    outputs: tuple[Parts, ...]
    results: Mapping[str, Sequence[tuple[Typed, ...]]]
    reshards: tuple[Reshard, ...] = ()
    sums: Mapping[str, Sequence[Sum]] = field(default_factory=dict[str, "Sequence[Sum]"])


def propagated(module: Any) -> Propagated:
    """The parts of every value of a module of ``spmd.marked``. Raises any error of JAX's private bindings.

    Shardy refuses some modules from HLO (calls with several results are tuples there), and HLO has no
    ``sdy.manual_computation``. Such modules are propagated in JAX's order.
    """
    ir, _, _ = _compat.mlir_bindings()
    if any(op.name == _MANUAL for op in _walk(module.operation)):
        return _read(module)
    try:
        with module.context:
            again = ir.Module.parse(_compat.through_hlo(module))
            _restored(again, _meshes(module), ir)
            return _read(again)
    except ir.MLIRError:
        return _read(module)


def _meshes(module: Any) -> dict[str, Any]:
    return {str(op.attributes["sym_name"]): op for op in module.body.operations if op.operation.name == "sdy.mesh"}


def _read(module: Any) -> Propagated:
    """The propagation's result for a module, which changes in place."""
    _, passes, sdy = _compat.mlir_bindings()
    with module.context:
        read = _Reader(_meshes(module).values(), sdy)
        passes.PassManager.parse(_PROPAGATION).run(module.operation)
        main = next(op for op in module.body.operations if str(op.operation.attributes["sym_name"]) == '"main"')
        arguments = read.signature(main, "arg_attrs", main.type.inputs)
        outputs = read.signature(main, "res_attrs", main.type.results)
        results: dict[str, list[tuple[Typed, ...]]] = {}
        for op in _walk(module.operation):
            if len(op.results) and (mark := mark_of(str(op.location))):
                results.setdefault(mark, []).append(read.results(op))
        passes.PassManager.parse(_RESHARDS).run(module.operation)
        reshards, sums = _inserted(module, read)
    return Propagated(arguments, outputs, results, reshards, sums)


def _inserted(module: Any, read: _Reader) -> tuple[tuple[Reshard, ...], dict[str, list[Sum]]]:
    """The reshards of operands, and by mark the sums over devices."""
    found: list[Reshard] = []
    sums: dict[str, list[Sum]] = {}
    for op in _walk(module.operation):
        if op.name == "sdy.reshard":
            [(shape, after)] = read.results(op)
            readers = tuple(dict.fromkeys(m for use in op.results[0].uses if (m := mark_of(str(use.owner.location)))))
            if readers:
                found.append(Reshard(shape, read.of(op.operands[0]), after, readers))
        elif op.name == _SUM and (mark := mark_of(str(op.location))):
            [(shape, parts)] = read.results(op)
            sums.setdefault(mark, []).append(Sum(shape, parts, str(op.attributes["reduction_axes"])))
    return tuple(found), sums


class _Reader:
    """Reads the parts of values: ``meshes`` are the module's."""

    def __init__(self, meshes: Any, sdy: Any) -> None:
        self.sdy = sdy
        self.axes: dict[str, dict[str, int]] = {}
        self.known: dict[str, Parts] = {}
        self.given: dict[str, tuple[Parts, ...]] = {}
        """By function: the parts of its arguments."""
        for op in meshes:
            axes = map(sdy.MeshAxisAttr, sdy.MeshAttr(op.attributes["mesh"]).axes)
            self.axes[str(op.attributes["sym_name"]).strip('"')] = {a.name: a.size for a in axes}

    def parts(self, kind: Any, sharding: Any) -> Parts:
        """Of a value of this type with this sharding, None: whole."""
        rank = len(shape_of(kind))
        if sharding is None:
            return (1,) * rank
        key = str(sharding)
        if key not in self.known:
            self.known[key] = self._parts(sharding)
        found = self.known[key]
        return found if len(found) == rank else (1,) * rank

    def _parts(self, sharding: Any) -> Parts:
        sdy = self.sdy
        sharding = sdy.TensorShardingAttr(sharding)
        axes = self.axes.get(str(sharding.mesh_or_ref).strip('@"'), {})

        def size(axis: Any) -> int:
            axis = sdy.AxisRefAttr(axis)
            inside = axis.sub_axis_info
            return axes.get(axis.name, 1) if inside is None else sdy.SubAxisInfoAttr(inside).size

        dimensions = (sdy.DimensionShardingAttr(d).axes for d in sharding.dimension_shardings)
        return tuple(math.prod(map(size, axes)) for axes in dimensions)

    def signature(self, function: Any, name: str, kinds: Any) -> tuple[Parts, ...]:
        """Of a function's arguments (``arg_attrs``) or results (``res_attrs``), by their types."""
        each = _each(function, name, len(kinds))
        return tuple(self.parts(kind, a.get("sdy.sharding")) for kind, a in zip(kinds, each, strict=True))

    def results(self, op: Any) -> tuple[Typed, ...]:
        """Of each result of an operation."""
        return tuple(
            (shape_of(r.type), self.parts(r.type, sharding))
            for r, sharding in zip(op.results, self._shardings(op), strict=True)
        )

    def _shardings(self, op: Any) -> Sequence[Any]:
        key = next((k for k in _KEYS if k in op.attributes), None)
        if key is None:
            return (None,) * len(op.results)
        found = op.attributes[key]
        if str(found).startswith("#sdy.sharding_per_value"):
            each = list(self.sdy.TensorShardingPerValueAttr(found).shardings)
            return each if len(each) == len(op.results) else (None,) * len(op.results)
        return (found,) if len(op.results) == 1 else (None,) * len(op.results)

    def of(self, value: Any) -> Parts:
        """Of any value: a result, or an argument of the program or of a loop's body."""
        owner = getattr(value.owner, "operation", value.owner)
        if hasattr(owner, "results"):
            return self.results(owner)[value.result_number][1]
        above, at = owner.owner.operation, value.arg_number
        if above.name == "func.func":
            name = str(above.attributes["sym_name"])
            if name not in self.given:
                self.given[name] = self.signature(above, "arg_attrs", [a.type for a in owner.arguments])
            return self.given[name][at]
        each = self._shardings(above)
        return self.parts(value.type, each[at] if at < len(each) else None)


def shape_of(kind: Any) -> tuple[int, ...]:
    """The shape of an MLIR type; empty if it has none."""
    return tuple(kind.shape) if hasattr(kind, "shape") and getattr(kind, "has_static_shape", True) else ()


def _each(function: Any, name: str, count: int) -> list[dict[str, Any]]:
    """The attributes of each argument or result of a function."""
    attributes = function.operation.attributes
    if name not in attributes:
        return [{} for _ in range(count)]
    return [{n.name: n.attr for n in _named(a)} for a in attributes[name]]


def _named(attributes: Any) -> Iterator[Any]:
    for i in range(len(attributes)):
        yield attributes[i]


def _walk(op: Any) -> Iterator[Any]:
    op = getattr(op, "operation", op)
    yield op
    for region in op.regions:
        for block in region.blocks:
            for inner in list(block.operations):
                yield from _walk(inner)


def _restored(module: Any, meshes: Mapping[str, Any], ir: Any) -> None:
    """Turn the shardings that HLO keeps as text into Shardy's attributes, in place."""
    body = module.body
    here = {str(op.operation.attributes["sym_name"]) for op in body.operations if op.operation.name == "sdy.mesh"}
    first = body.operations[0]
    for name, mesh in meshes.items():
        if name not in here:
            clone = mesh.operation.clone(ir.InsertionPoint(first))
            assert clone is not None
    for function in body.operations:
        if function.operation.name != "func.func":
            continue
        for name in ("arg_attrs", "res_attrs"):
            if name in function.operation.attributes:
                each = _each(function, name, 0)
                kept = [ir.DictAttr.get(_without_text(a, ir)) for a in each]
                function.operation.attributes[name] = ir.ArrayAttr.get(kept)
    for op in list(_walk(module.operation)):
        text = _text(op.attributes)
        if not text:
            continue
        sharding = ir.Attribute.parse(text)
        if op.name == "stablehlo.custom_call" and _string(op.attributes["call_target_name"]) in _CONSTRAINTS:
            one = _only(text, ir)
            with ir.InsertionPoint(op), op.location:
                made = ir.Operation.create(
                    "sdy.sharding_constraint",
                    results=[op.results[0].type],
                    operands=[op.operands[0]],
                    attributes={"sharding": one},
                )
            op.results[0].replace_all_uses_with(made.results[0])
            op.erase()
        else:
            op.attributes["sdy.sharding"] = sharding


def _only(text: str, ir: Any) -> Any:
    """The sharding of one value, however it is written."""
    inside = text.removeprefix("#sdy.sharding_per_value<[").removesuffix("]>")
    return ir.Attribute.parse(text if inside == text else f"#sdy.sharding{inside}")


def _without_text(attributes: dict[str, Any], ir: Any) -> dict[str, Any]:
    text = _text(attributes)
    kept = {k: v for k, v in attributes.items() if k not in ("mhlo.frontend_attributes", "mhlo.sharding")}
    return {**kept, "sdy.sharding": ir.Attribute.parse(text)} if text else kept


def _text(attributes: Any) -> str:
    """The sharding that HLO keeps as text; empty if there is none."""
    if "mhlo.frontend_attributes" not in attributes:
        return ""
    inside = attributes["mhlo.frontend_attributes"]
    return _string(inside[_IN_HLO]) if _IN_HLO in inside else ""


def _string(attribute: Any) -> str:
    return attribute.value if hasattr(attribute, "value") else str(attribute).strip('"')


__all__ = ["Parts", "Propagated", "Reshard", "Sum", "Typed", "propagated"]
