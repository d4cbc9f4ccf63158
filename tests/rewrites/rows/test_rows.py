"""`rows`: an equation on some rows makes those rows of what it makes of all, and totals of parts make the total."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxtensile import _compat
from jaxtensile.program.trace import trace_jaxpr
from jaxtensile.rewrites.rows import batched
from jaxtensile.rewrites.rows.rows import ELEMENTWISE, Passing, Row, adding_scatter, made_of_whole, passing

KEY = jax.random.key(0)


def normal(*shape):
    """Whole numbers as floats: their sums are exact, whatever the kernel's order."""
    return jnp.round(8 * jax.random.normal(jax.random.fold_in(KEY, len(shape)), shape))


def whole(*shape, below=4):
    return jax.random.randint(KEY, shape, 0, below)


def convolution(dims, **kwargs):
    return lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=dims, **kwargs)


BATCHED = lax.GatherDimensionNumbers(
    offset_dims=(), collapsed_slice_dims=(1,), start_index_map=(1,), operand_batching_dims=(0,),
    start_indices_batching_dims=(0,),
)  # fmt: skip
BATCHED_SCATTER = lax.ScatterDimensionNumbers(
    update_window_dims=(), inserted_window_dims=(1,), scatter_dims_to_operand_dims=(1,), operand_batching_dims=(0,),
    scatter_indices_batching_dims=(0,),
)  # fmt: skip
ROWS = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
COLUMNS = lax.ScatterDimensionNumbers(
    update_window_dims=(0,), inserted_window_dims=(1,), scatter_dims_to_operand_dims=(1,)
)
SUM = ((2, 1), (1, 1), ((0, 0), (1, 0)))

CASES = {
    # name: (function of one equation, operands, (operand, dimension) that pass rows on)
    "add": (lax.add, (normal(4, 6), normal(4, 6)), {(0, 0), (0, 1), (1, 0), (1, 1)}),
    "add 1": (lambda x, y: jax.lax.add_p.bind(x, y), (normal(4, 6), normal(4, 6)), {(0, 0), (0, 1), (1, 0), (1, 1)}),
    "scaled": (lambda x: x * 2.0, (normal(4, 6),), {(0, 0), (0, 1)}),
    "select": (
        lax.select_n, (normal(4, 6) > 0, normal(4, 6), -normal(4, 6)), {(o, d) for o in range(3) for d in (0, 1)},
    ),
    "clamp": (lambda x: lax.clamp(-0.5, x, 0.5), (normal(4, 6),), {(0, 0), (0, 1)}),
    "convert": (lambda x: lax.convert_element_type(x, jnp.bfloat16), (normal(4, 6),), {(0, 0), (0, 1)}),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (3, 4, 5, 6), (1, 3)), (normal(4, 6),), {(0, 0), (0, 1)}),
    "flat": (lambda x: lax.reshape(x, (24, 5)), (normal(4, 6, 5),), {(0, 0), (0, 2)}),
    "split up": (lambda x: lax.reshape(x, (4, 1, 3, 2, 5)), (normal(4, 6, 5),), {(0, 0), (0, 2)}),
    "apart": (lambda x: lax.reshape(x, (4, 2, 3)), (normal(4, 6),), {(0, 0)}),
    "turned": (lambda x: lax.reshape(x, (20, 6), (2, 0, 1)), (normal(4, 6, 5),), {(0, 1), (0, 2)}),
    "ones": (lambda x: lax.reshape(x, (1, 4, 1, 6)), (normal(4, 6),), {(0, 0), (0, 1)}),
    "squeeze": (lambda x: lax.squeeze(x, (0, 2)), (normal(1, 4, 1, 6),), {(0, 1), (0, 3)}),
    "transpose": (lambda x: lax.transpose(x, (2, 0, 1)), (normal(4, 6, 5),), {(0, 0), (0, 1), (0, 2)}),
    "sum": (
        lambda x: lax.reduce_sum_p.bind(x, axes=(0, 2), out_sharding=None), (normal(4, 6, 5),),
        {(0, 0), (0, 1), (0, 2)},
    ),
    "max": (lambda x: lax.reduce_max_p.bind(x, axes=(1,), out_sharding=None), (normal(4, 6),), {(0, 0), (0, 1)}),
    "min": (lambda x: lax.reduce_min_p.bind(x, axes=(0,), out_sharding=None), (normal(4, 6),), {(0, 0), (0, 1)}),
    "argmax": (lambda x: lax.argmax(x, 1, jnp.int32), (normal(4, 6),), {(0, 0)}),
    "product": (
        lambda x, y: lax.dot_general(x, y, (((2,), (1,)), ((0,), (2,)))),
        (normal(4, 6, 5), normal(8, 5, 4)),
        {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)},
    ),
    "products": (
        lambda x, y: lax.dot_general(x, y, (((0, 1), (1, 0)), ((), ()))),
        (normal(4, 6, 5), normal(6, 4, 8)),
        {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)},
    ),
    "convolution": (
        convolution(("NHWC", "HWIO", "NHWC")), (normal(4, 5, 5, 3), normal(3, 3, 3, 2)),
        {(0, 0), (0, 3), (1, 2), (1, 3)},
    ),
    "depthwise": (
        convolution(("NHWC", "HWIO", "NHWC"), feature_group_count=4), (normal(4, 5, 5, 4), normal(3, 3, 1, 4)),
        {(0, 0), (0, 3), (1, 3)},
    ),
    "batches in groups": (
        convolution(("NHWC", "HWIO", "NHWC"), batch_group_count=4), (normal(4, 5, 5, 2), normal(3, 3, 2, 4)),
        {(0, 0), (1, 3)},
    ),
    "filter's gradient": (
        convolution(("CHWN", "IHWO", "NHWC")), (normal(4, 5, 5, 3), normal(4, 5, 5, 2)),
        {(0, 0), (0, 3), (1, 0), (1, 3)},
    ),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 1), (normal(4, 6), normal(4, 6)), {(0, 0), (1, 0)}),
    "pad": (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 2, 0))), (normal(4, 6),), {(0, 0)}),
    "slice": (lambda x: lax.slice(x, (0, 1), (4, 5)), (normal(4, 6),), {(0, 0)}),
    "stride": (lambda x: lax.slice(x, (0, 0), (4, 6), (2, 1)), (normal(4, 6),), {(0, 1)}),
    "split": (lambda x: lax.split(x, (2, 4), 1), (normal(4, 6),), {(0, 0)}),
    "rev": (lambda x: lax.rev(x, (1,)), (normal(4, 6),), {(0, 0)}),
    "cumsum": (lambda x: lax.cumsum(x, 1), (normal(4, 6),), {(0, 0)}),
    "sort": (lambda x, y: lax.sort((x, y), dimension=1), (normal(4, 6), whole(4, 6)), {(0, 0), (1, 0)}),
    "top_k": (lambda x: lax.top_k(x, 2), (normal(4, 6),), {(0, 0)}),
    "embedding": (
        lambda t, i: lax.gather(t, i, ROWS, (1, 6), mode="clip"), (normal(4, 6), whole(5, 1)), {(0, 1), (1, 0)},
    ),
    "chosen": (
        lambda x, i: lax.gather(x, i, BATCHED, (1, 1), mode="fill"), (normal(4, 6), whole(4, 1, below=6)),
        {(0, 0), (1, 0)},
    ),
    "chosen's gradient": (
        lambda x, i, u: lax.scatter_add(x, i, u, BATCHED_SCATTER, mode="drop"),
        (normal(4, 6), whole(4, 1, below=6), normal(4)),
        {(0, 0), (1, 0), (2, 0)},
    ),
    "columns": (
        lambda x, i, u: lax.scatter_add(x, i, u, COLUMNS, mode="drop"),
        (normal(4, 6), whole(1, below=6), normal(4)),
        {(0, 0), (2, 0)},
    ),
    "windows": (
        lambda x: lax.reduce_window_max_p.bind(
            x, window_dimensions=(1, 2), window_strides=(1, 1), padding=((0, 0), (1, 0)), base_dilation=(1, 1),
            window_dilation=(1, 1),
        ), (normal(4, 6),), {(0, 0)},
    ),
}  # fmt: skip


def equation(fun, operands):
    (eqn,) = jax.make_jaxpr(fun)(*operands).eqns
    return eqn


def cut(x, row, rows, low, high):
    return x if row is None else lax.slice_in_dim(x, low * row.block, high * row.block, axis=row.dim)


def run(eqn, operands, params):
    out = eqn.primitive.bind(*operands, **{**eqn.params, **params})
    return list(out) if eqn.primitive.multiple_results else [out]


def agrees(eqn, operands, how: Passing, rows, parts, rtol=0.0):
    """Whether the parts make what the whole makes."""
    expected = run(eqn, operands, {})
    n = rows // parts
    made = [
        run(eqn, [cut(x, r, rows, k * n, k * n + n) for x, r in zip(operands, how.needs, strict=True)], how.params(n))
        for k in range(parts)
    ]
    for i, (row, all_of_it) in enumerate(zip(how.gives, expected, strict=True)):
        pieces = [m[i] for m in made]
        if isinstance(row, Row):
            np.testing.assert_allclose(jnp.concatenate(pieces, row.dim), all_of_it, rtol, atol=rtol)
        else:
            got = {"add": sum, "max": lambda p: jnp.max(jnp.stack(p), 0), "min": lambda p: jnp.min(jnp.stack(p), 0)}[
                row
            ](pieces)
            np.testing.assert_array_equal(got, all_of_it)


@pytest.mark.parametrize("name", CASES)
def test_parts_make_what_the_whole_makes(name):
    fun, operands, expected = CASES[name]
    eqn = equation(fun, operands)
    atoms = iter(operands)
    given = [next(atoms) if not isinstance(v, _compat.Literal) else v.val for v in eqn.invars]
    passed = set()
    arrays = [i for i, v in enumerate(eqn.invars) if not isinstance(v, _compat.Literal)]
    for number, i in enumerate(arrays):
        for dim, size in enumerate(given[i].shape):
            how = passing(eqn, [Row(dim) if k == i else None for k in range(len(given))], size)
            if how is None:
                continue
            assert how.needs[i] == Row(dim)
            passed.add((number, dim))
            for parts in (k for k in range(1, size + 1) if size % k == 0):
                agrees(eqn, given, how, size, parts)
    assert passed == expected


def test_rows_of_several_places_next_to_each_other():
    x = normal(12, 5)
    eqn = equation(lambda x: lax.reshape(x, (4, 3, 5)), (x,))
    how = passing(eqn, [Row(0, 3)], 4)
    assert how is not None and how.gives == (Row(0),)
    agrees(eqn, [x], how, 4, 2)
    back = equation(lambda x: lax.reshape(x, (12, 5)), (x.reshape(4, 3, 5),))
    assert passing(back, [Row(0)], 4).gives == (Row(0, 3),)


@pytest.mark.parametrize("name", ("feature_group_count", "batch_group_count"))
def test_rows_of_several_groups_of_a_convolution(name):
    """Six groups for three rows: two of each."""
    sizes = {"feature_group_count": (5, 12), "batch_group_count": (12, 2)}[name]
    x, k = normal(sizes[0], 4, 4, sizes[1]), normal(3, 3, 2, 12)
    eqn = equation(convolution(("NHWC", "HWIO", "NHWC"), **{name: 6}), (x, k))
    dim = 3 if name == "feature_group_count" else 0
    for given in ([Row(dim, 4), None], [None, Row(3, 4)], [Row(dim, 4), Row(3, 4)]):
        how = passing(eqn, given, 3)
        assert how is not None and how.needs == (Row(dim, 4), Row(3, 4)) and how.gives == (Row(3, 4),)
        agrees(eqn, [x, k], how, 3, 3)
    assert passing(eqn, [Row(dim, 3), None], 4) is None


def test_operands_that_disagree_pass_nothing_on():
    eqn = equation(lax.add, (normal(4, 4), normal(4, 4)))
    assert passing(eqn, [Row(0), Row(1)], 4) is None
    eqn = equation(lambda x, y: lax.dot(x, y), (normal(4, 4), normal(4, 4)))
    assert passing(eqn, [Row(0), Row(0)], 4) is None  # free on one side, summed over on the other


@pytest.mark.parametrize(
    "fun", [lambda x: lax.fft(x, "FFT", (4,)), lambda x: lax.expand_dims(lax.top_k(x, 2, axis=0)[0], ())]
)
def test_what_has_no_rule_is_for_whole_arrays(fun):
    eqn = equation(fun, (normal(4, 4),))
    assert passing(eqn, [Row(0)], 4) is None


SPD = jnp.stack([jnp.eye(3) * (k + 2) + 0.1 * jnp.ones((3, 3)) for k in range(4)])
LOWER = jnp.tril(SPD)
DERIVED = {
    "cholesky": (lambda x: lax.linalg.cholesky(x, symmetrize_input=False), (SPD,)),
    "triangular_solve": (lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True), (LOWER, SPD)),
    "eigh": (lambda x: lax.linalg.eigh(x, symmetrize_input=False), (SPD,)),
    "svd": (lambda x: lax.linalg.svd(x, full_matrices=False), (SPD[:, :2],)),
    "lu": (lax.linalg.lu, (SPD,)),
    "householder_product": (lax.linalg.householder_product, (SPD, SPD[:, 0])),
    "qr": (lambda x: lax.linalg.qr(x, full_matrices=False), (SPD,)),
    "tridiagonal_solve": (lax.linalg.tridiagonal_solve, (*(SPD[:, k] for k in range(3)), SPD)),
    "fft": (lambda x: jnp.fft.rfft(x), (SPD,)),
}


@pytest.mark.parametrize("name", DERIVED)
def test_rows_that_the_batching_rule_of_jax_knows(name):
    """Of a batch of matrices, and of a batch of such; not of the matrices themselves, for all that they have rows."""
    fun, operands = DERIVED[name]
    for batches in (1, 2):
        args = operands if batches == 1 else tuple(jnp.stack([x, x + 0.1 * jnp.eye(*x.shape[-2:])]) for x in operands)
        traced = trace_jaxpr(jax.make_jaxpr(fun)(*args))
        values = dict(zip(traced.arguments, args, strict=True)) | traced.consts
        for equation in traced.equations:
            given = [values[a] if isinstance(a, int) else a.val for a in equation.operands]
            made = run(equation.eqn, given, {})
            values.update(zip(equation.results, made, strict=True))
            if equation.eqn.primitive.name != name:
                continue
            passed = set()
            for dim in range(given[0].ndim):
                how = passing(equation.eqn, [Row(dim), *(None for _ in given[1:])], given[0].shape[dim])
                if how is not None:
                    passed.add(dim)
                    agrees(equation.eqn, given, how, given[0].shape[dim], given[0].shape[dim], rtol=1e-4)
            assert passed == set(range(given[0].ndim - 1 if name == "fft" else batches))
            break
        else:
            raise AssertionError(f"no {name} in it")


def test_barriers_pass_everything_on():
    assert passing(None, [Row(0), None], 4) == Passing((Row(0), None), (Row(0), None))


def test_elementwise_names_are_primitives():
    import jax._src.ad_util
    import jax._src.lax.lax

    known = {
        v.name
        for m in (jax._src.lax.lax, jax._src.ad_util)
        for v in vars(m).values()
        if hasattr(v, "def_impl") and hasattr(v, "name")
    }
    assert {"add", "select_n", "add_any"} <= known and len(ELEMENTWISE & known) > 60


@pytest.mark.parametrize("shape, dims", [((8, 4), (1,)), ((8, 4), ())])
def test_constants_make_their_rows_themselves(shape, dims):
    x = normal(*(shape[d] for d in dims))
    eqn = equation(lambda x: lax.broadcast_in_dim(x, shape, dims), (x,))
    how = made_of_whole(eqn, Row(0, 2), 4)
    assert how is not None
    agrees(eqn, [x], how, 4, 2)
    assert made_of_whole(eqn, Row(1), 4) is None or not dims


def test_iotas_make_rows_of_other_dimensions():
    eqn = equation(lambda: lax.broadcasted_iota(jnp.int32, (4, 6), 1), ())
    how = made_of_whole(eqn, Row(0), 4)
    assert how is not None and how.numbered is None and run(eqn, [], how.params(2))[0].shape == (2, 6)


def test_what_depends_on_its_place_is_told_the_place():
    eqn = equation(lambda: lax.broadcasted_iota(jnp.int32, (4, 6), 1), ())
    how = made_of_whole(eqn, Row(1, 2), 3)
    assert how is not None and how.numbered is not None
    np.testing.assert_array_equal(how.numbered((), 2, 4), run(eqn, [], {})[0][:, 2:6])
    eqn = equation(lambda key: jax.random.bits(key, (4, 6)), (KEY,))
    how = made_of_whole(eqn, Row(0), 4)
    assert how is not None and how.numbered is not None and how.needs == (None,)
    np.testing.assert_array_equal(how.numbered((KEY,), 1, 2), run(eqn, [KEY], {})[0][1:3])


def test_scatters_that_add_all_updates_up():
    """As the gradient of an embedding: rows of the indices and of the updates, and no other."""

    def fun(x, i):
        return jnp.zeros((9, 5)).at[i].add(x)

    closed = jax.make_jaxpr(fun)(normal(4, 3, 5), whole(4, 3, below=9))
    eqn = next(e for e in closed.eqns if e.primitive.name.startswith("scatter"))
    assert adding_scatter(eqn, (None, Row(0), None)) == (None, Row(0), Row(0))
    assert adding_scatter(eqn, (None, None, Row(1))) == (None, Row(1), Row(1))
    assert adding_scatter(eqn, (None, Row(0), Row(1))) is None
    assert adding_scatter(eqn, (None, None, Row(2))) is None
    assert adding_scatter(eqn, (Row(0), Row(0), Row(0))) is None


def test_a_loop_is_never_batched_to_see_whether_its_rows_are_its_own(monkeypatch):
    """It is never the same equation, and to make it takes as long as to trace it."""
    asked = []
    monkeypatch.setattr(batched, "_is_itself", lambda *given: asked.append(given) or False)
    for fun in (
        lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sort(c[1])), (0, x))[1],
        lambda x: lax.cond(True, jnp.sort, jnp.sin, x),
        jax.jit(jnp.sort),
    ):
        (equation,) = (
            e for e in jax.make_jaxpr(fun)(normal(4, 4)).eqns if e.primitive.name in ("while", "cond", "jit")
        )
        assert batched.batched(equation, (0,) * len(equation.invars)) is None
    assert not asked
