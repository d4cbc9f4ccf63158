"""What Shardy's propagation says of a module, read back: divided values, operands to gather, sums to add up."""

import pytest

from jaxtensile import _compat
from jaxtensile.spmd.shardy import Reshard, Sum, propagated

TEXT = """
module @m {
  sdy.mesh @mesh = <["data"=2, "model"=4]>
  func.func public @main(
      %x: tensor<16x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},
      %w: tensor<32x64xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {"model"}]>},
      %v: tensor<64x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"model"}, {}]>}) -> tensor<16x32xf32> {
    %g = sdy.sharding_constraint %w <@mesh, [{}, {"model"}]> : tensor<32x64xf32>
    %0 = stablehlo.dot_general %x, %g, contracting_dims = [1] x [0]
      : (tensor<16x32xf32>, tensor<32x64xf32>) -> tensor<16x64xf32> loc("jit(f)/jt0_/dot_general")
    %1 = stablehlo.tanh %0 : tensor<16x64xf32> loc("jit(f)/jt1_/tanh")
    %2 = stablehlo.dot_general %1, %v, contracting_dims = [1] x [0]
      : (tensor<16x64xf32>, tensor<64x32xf32>) -> tensor<16x32xf32> loc("jit(f)/jt2_/dot_general")
    return %2 : tensor<16x32xf32>
  }
}
"""


@pytest.fixture
def module():
    ir, _, _ = _compat.mlir_bindings()
    with _compat.mlir_context():
        return ir.Module.parse(TEXT)


@pytest.mark.parametrize("direct", [False, True], ids=["through HLO", "as it is"])
def test_of_two_products_the_parts_the_gather_and_the_sum(module, direct, monkeypatch):
    if direct:
        monkeypatch.setattr(_compat, "through_hlo", lambda module: "no module at all")
    found = propagated(module)
    assert found.arguments == ((2, 1), (2, 4), (4, 1))
    assert found.outputs == ((2, 1),)
    assert [found.results[mark][-1] for mark in "012"] == [
        (((16, 64), (2, 4)),),
        (((16, 64), (2, 4)),),
        (((16, 32), (2, 1)),),
    ]
    assert found.reshards == (Reshard((32, 64), (2, 4), (1, 4), ("0",)),)
    assert found.sums == {"2": [Sum((16, 32), (2, 1), '#sdy<axis_ref_list{"model"}>')]}
